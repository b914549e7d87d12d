"""What a server says of itself before it is measured, from servers that are broken or hostile."""

import httpx
import pytest
from bakehouse_cluster.bench.encoders import VllmEncoder
from bakehouse_cluster.bench.finding import found_server, owners_in
from bakehouse_replica.core.errors import StartupError


def test_models_are_found_with_their_owners() -> None:
    content = b'{"data": [{"id": "a", "owned_by": "us\\n"}, {"id": "b"}, {"id": "c", "owned_by": null}]}'
    assert owners_in(httpx.Response(200, content=content)) == {"a": "us", "b": "", "c": ""}


@pytest.mark.parametrize(
    "content",
    [
        b"<html>",
        b"[" * 5000,
        b"[]",
        b'{"data": 3}',
        b'{"data": ["x"]}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "\\ud800"}]}',
        b'{"data": [{"id": "\\u001b[2J"}]}',
    ],
)
def test_what_is_no_list_of_models_is_not_read(content: bytes) -> None:
    assert owners_in(httpx.Response(200, content=content)) is None


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (413, b'{"error": {"message": "at most 4 MiB"}}', "/tokenize of the server: HTTP 413: at most 4 MiB"),
        (413, b"at most 4 MiB\x1b", r"/tokenize of the server: HTTP 413: at most 4 MiB\x1b"),
        (200, b"[]", "/tokenize of the server answers no JSON object"),
        (200, b"[" * 5000, "/tokenize of the server: "),
        (200, b'{"tokens": [1, true]}', "answers without token ids"),
        (200, b'{"tokens": 3}', "answers without token ids"),
    ],
)
def test_a_tokenizer_that_fails_is_told_in_one_line(status: int, content: bytes, words: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    with httpx.Client(transport=transport, base_url="http://x") as http, pytest.raises(StartupError) as refused:
        VllmEncoder(http, "m").encode("text")
    assert words in refused.value.message
    assert refused.value.message.isprintable()


def test_a_server_that_is_not_there_is_told_by_its_address() -> None:
    with pytest.raises(StartupError) as refused, found_server("http://127.0.0.1:9"):
        pass
    assert refused.value.message == (
        "no server answers at http://127.0.0.1:9: Connection refused; start one, or name another by --url"
    )

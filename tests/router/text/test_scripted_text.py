"""The text side of a scripted model: pieces, markers, templates."""

from bakehouse_replica.script import parse_script
from bakehouse_router.text.messages import ChatMessage
from bakehouse_router.text.model_text import scripted_model_text
from bakehouse_router.text.scripted_text import ScriptedTokenizer
from hypothesis import given
from hypothesis import strategies as st

TREE: dict[str, object] = {
    "pieces": ["</s>", "a", "ab", "abc", "é", {"special": "<|turn|>"}, {"bytes": "c3"}],
    "eos": 0,
    "default": {"ids": [1]},
}
FIRST_BYTE = 7
TURN = 5


def tokenizer() -> ScriptedTokenizer:
    return ScriptedTokenizer(parse_script(TREE))


def byte_ids(text: str) -> tuple[int, ...]:
    return tuple(FIRST_BYTE + byte for byte in text.encode())


def test_the_longest_piece_at_each_place_is_taken_and_bytes_where_none_fits() -> None:
    assert tokenizer().encode_raw("abcabab-a") == (3, 2, 2, *byte_ids("-"), 1)
    assert tokenizer().encode_raw("é") == (4,)
    assert tokenizer().encode_raw("è") == (6, FIRST_BYTE + 0xA8)


def test_special_pieces_of_a_raw_prompt_are_tokens() -> None:
    assert tokenizer().encode_raw("a<|turn|>a</s>") == (1, TURN, 1, 0)


@given(st.text())
def test_a_text_without_special_pieces_survives_encoding_and_decoding(text: str) -> None:
    ours = tokenizer()
    token_ids = ours.encode_raw(text)
    decoded = b"".join(map(ours.vocabulary.bytes_of, token_ids))
    assert decoded.decode() == text.replace("</s>", "").replace("<|turn|>", "")
    assert ours.min_tokens(text) <= len(token_ids)


def test_special_pieces_have_no_bytes_but_a_name() -> None:
    vocabulary = tokenizer().vocabulary
    assert (vocabulary.bytes_of(TURN), vocabulary.name_of(TURN)) == (b"", "<|turn|>")
    assert (vocabulary.bytes_of(0), vocabulary.name_of(0)) == (b"", "</s>")


def test_markers_of_the_template_are_tokens_and_those_in_a_message_are_text() -> None:
    template = "{% for message in messages %}<|turn|>{{ message.content }}{% endfor %}"
    text = scripted_model_text(parse_script(TREE | {"chat_template": template}))
    token_ids = text.chat_template.encode([ChatMessage(role="user", content="a<|turn|>é</s>")])
    assert token_ids == (TURN, 1, *byte_ids("<|turn|>"), 4, *byte_ids("</s>"))


def test_the_default_template_shows_roles_and_contents() -> None:
    text = scripted_model_text(parse_script(TREE))
    messages = [ChatMessage(role="system", content="short"), ChatMessage(role="user", content="hi")]
    rendered = b"".join(map(text.tokenizer.vocabulary.bytes_of, text.chat_template.encode(messages)))
    assert rendered.decode() == "system: short\nuser: hi\nassistant: "


def test_a_scripted_model_is_sampled_as_openai_s_and_stops_at_its_end_of_sequence() -> None:
    defaults = scripted_model_text(parse_script(TREE)).defaults
    assert (defaults.temperature, defaults.stop_token_ids) == (1.0, (0,))
    assert scripted_model_text(parse_script(TREE | {"eos": None})).defaults.stop_token_ids == ()

"""One server for all who talk with it in other ways than HTTP: by gRPC, and by `bakehouse.connect`."""

import json
from collections.abc import Iterator

import pytest
from collector import collecting
from faces import Faces, served
from servers import Server

# A stream that nobody cancels takes 20 s: far longer than any test here waits for blocks to be free.
SCRIPT = {
    "pieces": ["a", "b", "c", "Hello", " world"],
    "replies": [{"when": "greet", "pieces": ["Hello", " world"]}],
    "default": {"pieces": ["a", "b", "c"]},
    "step_ms": 5,
    "max_model_len": 4096,
}


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What names the scripted model on the command line."""
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return f"scripted:{path}"


@pytest.fixture(scope="package")
def faces(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Faces]:
    with collecting() as collector, served(tmp_path_factory.mktemp("faces"), model, collector) as ready:
        yield ready


@pytest.fixture(scope="package")
def server(faces: Faces) -> Server:
    assert faces.server is not None
    return faces.server

"""What the gateway's tests share."""

import pytest
from bakehouse_router.text.model_text import ModelText
from gateways import tiny_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """The text side of a model with a tiny tokenizer, one token a byte."""
    return tiny_text(tmp_path_factory.mktemp("tokenizer"))

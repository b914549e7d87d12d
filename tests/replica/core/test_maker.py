"""Messages made the fast way are what their classes make."""

from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest
from bakehouse_replica.core.maker import maker_of
from bakehouse_replica.core.types import Draw, Request, TokenDelta, Usage


def test_what_is_made_equals_and_behaves_as_an_instance_of_the_class() -> None:
    made = maker_of(TokenDelta)(request_id="r", choice=1, start=2, token_ids=(3,), logprobs=())
    expected = TokenDelta(request_id="r", choice=1, start=2, token_ids=(3,))
    assert type(made) is TokenDelta
    assert (made, hash(made), repr(made)) == (expected, hash(expected), repr(expected))
    assert replace(made, start=5) == replace(expected, start=5)


def test_what_is_made_is_frozen() -> None:
    made = maker_of(Draw)(token_ids=(3,))
    with pytest.raises(FrozenInstanceError):
        made.token_ids = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.other = 1  # type: ignore[attr-defined]


def test_what_is_missing_or_unknown_is_refused_as_by_the_class() -> None:
    make = maker_of(Usage)
    with pytest.raises(TypeError, match="completion_tokens"):
        make(prompt_tokens=1, cached_tokens=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown"):
        make(prompt_tokens=1, cached_tokens=0, completion_tokens=0, unknown=1)  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True)
class Listing:
    items: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loose:
    item: int


@pytest.mark.parametrize("message", [Request, Listing, Loose, int])
def test_classes_whose_construction_is_more_than_setting_fields_are_refused(message: type) -> None:
    with pytest.raises(TypeError):
        maker_of(message)

"""Limits that come from outside: what is taken, what is refused, and in which words."""

import pytest
from bakehouse_replica.core.errors import ConfigError
from bakehouse_replica.core.live_limits import read_limits

NAMES = ("max_stops", "max_tools")


@pytest.mark.parametrize("limits", [{}, {"max_stops": 1}, {"max_tools": 3, "max_stops": 2**40}])
def test_known_limits_are_taken_as_they_are(limits: dict[str, object]) -> None:
    assert read_limits(limits, NAMES) == limits


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_stop": 1}, r"^user_config\.max_stop: unknown key; known here: max_stops, max_tools$"),
        ({"max_stops": 0}, r"^user_config\.max_stops: a whole number of at least 1 is expected, not 0$"),
        ({"max_tools": 1, "max_stops": "many"}, r"^user_config\.max_stops: a whole number .*, not 'many'$"),
        ({"max_stops": 1.5}, r"^user_config\.max_stops: .*, not 1\.5$"),
        ({"max_stops": True}, r"^user_config\.max_stops: .*, not True$"),
        ({"max_stops": None}, r"^user_config\.max_stops: .*, not None$"),
    ],
)
def test_what_is_no_limit_is_refused_with_its_path_and_value(limits: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_limits(limits, NAMES)

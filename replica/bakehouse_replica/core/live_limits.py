"""Limits that may be changed while everything runs, as they come from outside."""

from collections.abc import Collection, Mapping

from bakehouse_replica.core.errors import ConfigError


def read_limits(user_config: Mapping[str, object], names: Collection[str]) -> dict[str, int]:
    """The limits in Serve's `user_config`, of those that are called `names`.

    Raises `ConfigError`, beginning with the path of the key, for any other key and any value that is no whole
    number of at least 1.
    """
    limits: dict[str, int] = {}
    for name, value in user_config.items():
        if name not in names:
            raise ConfigError(f"user_config.{name}: unknown key; known here: {', '.join(names)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"user_config.{name}: a whole number of at least 1 is expected, not {value!r}")
        limits[name] = value
    return limits

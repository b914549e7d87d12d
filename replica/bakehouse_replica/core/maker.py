"""A faster way to make the frozen messages of which each step has one per sequence.

A frozen dataclass sets every field through `object.__setattr__`, and a call of its class collects keywords into
a dict: 1.2 µs for the nine fields of a `TokenDelta`, where all of a sequence's step may cost 3. Here a plain twin
with the same slots is filled, and then becomes an instance of the message's class: 0.25 µs. What comes out is as
frozen, as comparable and as replaceable as any other instance.
"""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
M = TypeVar("M")


def maker_of(message: Callable[P, M]) -> Callable[P, M]:
    """What makes instances of `message`, a frozen slotted dataclass, from keywords as the class itself does.

    Raises `TypeError` for a class whose construction is more than setting fields and constant defaults.
    """
    if not isinstance(message, type) or not is_dataclass(message) or "__slots__" not in vars(message):
        raise TypeError(f"{message} is not a slotted dataclass")
    if hasattr(message, "__post_init__") or any(field.default_factory is not MISSING for field in fields(message)):
        raise TypeError(f"{message} does more than set its fields")
    defaults = {field.name: field.default for field in fields(message) if field.default is not MISSING}
    names = [field.name for field in fields(message)]
    parameters = ", ".join(f"{name}=defaults[{name!r}]" if name in defaults else name for name in names)
    lines = [
        f"def make(*, {parameters}):",
        "    self = Twin()",
        *(f"    self.{name} = {name}" for name in names),
        "    self.__class__ = message",
        "    return self",
    ]
    scope = {
        "Twin": type(message.__name__, (), {"__slots__": vars(message)["__slots__"]}),
        "message": message,
        "defaults": defaults,
    }
    exec("\n".join(lines), scope)  # as `dataclass` does: a loop over the names would cost more than is gained
    return cast(Callable[P, M], scope["make"])

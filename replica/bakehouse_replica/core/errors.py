"""The one error tree of bakehouse.

    BakehouseError
    ├── InvalidRequest            the request is wrong; names the parameter            HTTP 400
    │   ├── UnknownModel          the model is not served here                         HTTP 404
    │   ├── ContextTooLong        prompt and output do not fit the context             HTTP 400
    │   └── RequestTooLarge       the body is over the limit                           HTTP 413
    ├── UnknownRequest            no request of this id is known here                  HTTP 404
    ├── Unauthenticated           no key, or one that nobody has                       HTTP 401
    ├── Overloaded                no room now, come back later                         HTTP 429
    ├── DeadlineExceeded          the request's own time ran out                       HTTP 408
    ├── Unavailable               nobody serves at the moment                          HTTP 503
    │   └── EngineDead            the engine thread of this replica has died           HTTP 503
    │       └── RankLost          a rank of a tensor-parallel replica is out; names it HTTP 503
    └── StartupError              this model, memory or machine cannot be served as asked
        └── ConfigError           the configuration is wrong; names the path of the key

Status codes live only in `bakehouse_router.api.errors`. All of these cross process boundaries, so each is
rebuilt by pickle from its positional `args`.
"""


class BakehouseError(Exception):
    """Base of every error that bakehouse raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class InvalidRequest(BakehouseError, ValueError):
    """The request cannot be served as asked; `param` names the field, dotted where nested."""

    def __init__(self, message: str, param: str | None = None) -> None:
        BakehouseError.__init__(self, message)
        self.args = (message, param)
        self.param = param


class UnknownModel(InvalidRequest):
    """The named model is not served here."""


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and the output asked for, exceed the model's context length."""


class RequestTooLarge(InvalidRequest):
    """The request's body is over the limit."""


class UnknownRequest(BakehouseError):
    """No request of this id, of who asks, is known here."""


class Unauthenticated(BakehouseError):
    """The caller has given no key, or one that is not known here."""


class Overloaded(BakehouseError):
    """The queue is full; `retry_after_s` says when another attempt makes sense."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.args = (message, retry_after_s)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(BakehouseError):
    """The request's own time limit has passed."""


class Unavailable(BakehouseError):
    """No replica serves at the moment, or this one is draining."""


class EngineDead(Unavailable):
    """The engine thread of this replica has died; its requests are lost unless resumed elsewhere."""


class RankLost(EngineDead):
    """A rank of this replica has died, fallen silent or out of step; the message names it."""


class StartupError(BakehouseError):
    """What was asked for cannot be served on this machine; the message says what would work."""


class ConfigError(StartupError):
    """The configuration is wrong; the message begins with the path of the key."""

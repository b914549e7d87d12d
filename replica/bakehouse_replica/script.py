"""What a scripted model is made of: a JSON file of pieces and replies, parsed, checked and frozen.

The vocabulary is the file's pieces in their order, then one token for each of the 256 bytes. A reply is chosen by
a regular expression on the prompt's text; child i of a request follows the i-th of the matching replies, in turn.
At output index k the model wants the reply's token k, after its last one the end-of-sequence token or, without
one, the last token again.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.vocabulary import Vocabulary

N_BYTES = 256
_MAX_TOKENS_PER_STEP = 64
_MAX_STEP_MS = 60_000
# Listed probabilities may exceed 1 by this much: log-probabilities are written with a few digits.
_MASS_TOLERANCE = 1e-3

_LEAST_LOGPROB = -1e6

Item = TypeVar("Item")
T = TypeVar("T")
LogprobRow = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token: its bytes, and how they were given. A special one adds none to an output, but to a prompt."""

    content: bytes
    kind: Literal["text", "bytes", "special"] = "text"

    @property
    def is_special(self) -> bool:
        """Whether it is no text."""
        return self.kind == "special"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer. `when` None fits every prompt.

    `logprobs`: at each output index the log-probabilities that the model gives, or nothing, where it is all but
    sure of the reply's own token.
    """

    when: re.Pattern[str] | None
    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A whole file. `prefer`: at each output index the tokens that are all but as likely as the reply's own, in
    falling order; its last entry holds for all later ones. `raise_at` and `stall_at` are output indices.
    """

    pieces: tuple[Piece, ...]
    eos_id: int | None
    replies: tuple[Reply, ...]
    default: Reply
    prefer: tuple[tuple[int, ...], ...] = ()
    raise_at: int | None = None
    stall_at: int | None = None
    tokens_per_step: int = 1
    step_s: float = 0.0
    max_model_len: int = 4096
    chat_template: str | None = None

    @property
    def vocabulary_size(self) -> int:
        """Pieces and bytes."""
        return len(self.pieces) + N_BYTES

    def token_bytes(self) -> list[bytes]:
        """What each token stands for in a prompt, special ones spelled out."""
        return [piece.content for piece in self.pieces] + [bytes([byte]) for byte in range(N_BYTES)]

    def vocabulary(self) -> Vocabulary:
        """What each token adds to an output."""
        specials = {token_id: piece.content for token_id, piece in enumerate(self.pieces) if piece.is_special}
        return Vocabulary(
            dict(enumerate(self.token_bytes())) | dict.fromkeys(specials, b""),
            {token_id: content.decode(errors="replace") for token_id, content in specials.items()},
        )

    def replies_to(self, prompt: str) -> tuple[Reply, ...]:
        """The replies that fit a prompt, at least one."""
        fitting = tuple(reply for reply in self.replies if reply.when is not None and reply.when.search(prompt))
        return fitting or (self.default,)

    def wanted_id(self, reply: Reply, output_index: int) -> int:
        """The token that a reply has at `output_index`."""
        if output_index < len(reply.token_ids):
            return reply.token_ids[output_index]
        return reply.token_ids[-1] if self.eos_id is None else self.eos_id

    def preferred_ids(self, output_index: int) -> tuple[int, ...]:
        """The tokens that are all but as likely at `output_index`, best first."""
        return self.prefer[min(output_index, len(self.prefer) - 1)] if self.prefer else ()


def _piece(value: object) -> Piece:
    match value:
        case str(text) if text:
            return Piece(content=_encoded(text))
        case {"special": str(text), **rest} if text and not rest:
            return Piece(content=_encoded(text), kind="special")
        case {"bytes": str(digits), **rest} if digits and not rest:
            try:
                return Piece(content=bytes.fromhex(digits), kind="bytes")
            except ValueError:
                raise ValueError(f"{digits!r} is not an even number of hexadecimal digits") from None
    raise ValueError('a piece is a text, {"bytes": hexadecimal digits} or {"special": text}, none of them empty')


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is not text") from None


def _pattern(value: object) -> re.Pattern[str]:
    if not isinstance(value, str):
        raise ValueError("a regular expression is a text")
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None


def _row(value: object) -> LogprobRow:
    """One output index of `logprobs`: pairs of token id and log-probability; null is no pair."""
    pairs = [] if value is None else value
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise ValueError("a position is null or a list of [token id, log-probability at most 0]")
    row = tuple((token_id, float(logprob)) for token_id, logprob in pairs)
    if len({token_id for token_id, _ in row}) < len(row):
        raise ValueError("a token stands in it twice")
    mass = sum(math.exp(logprob) for _, logprob in row)
    if mass > 1 + _MASS_TOLERANCE:
        raise ValueError(f"the probabilities sum to {mass:.4g}, more than 1")
    return row


def _is_pair(pair: object) -> bool:
    match pair:
        case [int(token_id), int() | float() as logprob]:
            is_number = not isinstance(token_id, bool) and not isinstance(logprob, bool)
            return is_number and _LEAST_LOGPROB <= logprob <= 0
    return False


Index = Annotated[int, Field(ge=0, lt=2**31)]
PieceField = Annotated[Piece, PlainValidator(_piece)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _DefaultField(_Section):
    ids: list[int] | None = None
    pieces: list[PieceField] | None = None
    logprobs: list[Annotated[LogprobRow, PlainValidator(_row)]] = []


class _ReplyField(_DefaultField):
    when: Annotated[re.Pattern[str], PlainValidator(_pattern)]


class _File(_Section):
    pieces: list[PieceField]
    eos: int | None = None
    replies: list[_ReplyField] = []
    default: _DefaultField | None = None
    prefer: list[list[int]] = []
    raise_at: Index | None = None
    stall_at: Index | None = None
    tokens_per_step: int = Field(default=1, ge=1, le=_MAX_TOKENS_PER_STEP)
    step_ms: float = Field(default=0, ge=0, le=_MAX_STEP_MS)
    max_model_len: int = Field(default=4096, ge=2, lt=2**31)
    chat_template: str | None = None


def read_script(path: Path) -> Script:
    """The script in the JSON file at `path`.

    Raises `StartupError`, in one line that names the file and the place in it, where it is not one.
    """
    try:
        return parse_script(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise StartupError(f"script {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"script {path}: not JSON: {' '.join(str(error).split())}") from error
    except StartupError as error:
        raise StartupError(f"script {path}: {error.message}") from error


def parse_script(tree: object) -> Script:
    """The script in a tree of plain values. Raises `StartupError` beginning with the place that is wrong."""
    try:
        file = _File.model_validate(tree)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise StartupError(_complaint(problem["loc"], problem["type"], problem["msg"])) from error
    return _Builder(file).build()


def _complaint(location: Sequence[int | str], kind: str, message: str) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    if kind == "extra_forbidden":
        return f"{place}: unknown key"
    if kind == "missing":
        return f"{place}: required"
    if kind == "model_type":
        return f"{place or 'the file'}: it must be a JSON object"
    if kind == "value_error":  # a text of ours
        return f"{place}: {message.removeprefix('Value error, ')}"
    return f"{place}: it must be {message.removeprefix('Input should be ')}"


class _Builder:
    """Resolves texts to ids and checks that every id exists."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._n_vocabulary = len(file.pieces) + N_BYTES
        self._ids: dict[bytes, int] = {}
        for token_id, piece in enumerate(file.pieces):
            first = self._ids.setdefault(piece.content, token_id)
            if first != token_id:
                raise StartupError(f"pieces[{token_id}]: the same as pieces[{first}]")

    def build(self) -> Script:
        file = self._file
        if file.eos is not None and not 0 <= file.eos < len(file.pieces):
            raise StartupError(f"eos: {file.eos} is not the index of one of the {len(file.pieces)} pieces")
        return Script(
            pieces=tuple(
                replace(piece, kind="special") if token_id == file.eos else piece
                for token_id, piece in enumerate(file.pieces)
            ),
            eos_id=file.eos,
            replies=_each("replies", file.replies, lambda reply, place: self._reply(reply, reply.when, place)),
            default=self._reply(file.default or _DefaultField(ids=[]), None, "default"),
            prefer=_each("prefer", file.prefer, self._known),
            raise_at=file.raise_at,
            stall_at=file.stall_at,
            tokens_per_step=file.tokens_per_step,
            step_s=file.step_ms / 1000,
            max_model_len=file.max_model_len,
            chat_template=file.chat_template,
        )

    def _reply(self, reply: _DefaultField, when: re.Pattern[str] | None, place: str) -> Reply:
        if (reply.ids is None) == (reply.pieces is None):
            raise StartupError(f"{place}: a reply has either ids or pieces")
        if reply.ids is not None:
            token_ids = self._known(reply.ids, f"{place}.ids")
        else:
            token_ids = _each(f"{place}.pieces", reply.pieces or [], self._id_of)
        if not token_ids and self._file.eos is None:
            raise StartupError(f"{place}: an empty reply needs an eos")
        if len(reply.logprobs) > len(token_ids) + 1:
            raise StartupError(
                f"{place}.logprobs: {len(reply.logprobs)} positions for {len(token_ids)} tokens and their end"
            )
        for index, row in enumerate(reply.logprobs):
            self._known([token_id for token_id, _ in row], f"{place}.logprobs[{index}]")
        return Reply(when=when, token_ids=token_ids, logprobs=tuple(reply.logprobs))

    def _id_of(self, piece: Piece, place: str) -> int:
        if piece.content in self._ids:
            return self._ids[piece.content]
        if piece.kind == "bytes" and len(piece.content) == 1:
            return len(self._file.pieces) + piece.content[0]
        raise StartupError(f"{place}: {piece.content.decode(errors='backslashreplace')!r} is not in pieces")

    def _known(self, token_ids: Sequence[int], place: str) -> tuple[int, ...]:
        for token_id in token_ids:
            if not 0 <= token_id < self._n_vocabulary:
                raise StartupError(f"{place}: token id {token_id} is not between 0 and {self._n_vocabulary - 1}")
        return tuple(token_ids)


def _each(place: str, items: Sequence[Item], convert: Callable[[Item, str], T]) -> tuple[T, ...]:
    return tuple(convert(item, f"{place}[{index}]") for index, item in enumerate(items))

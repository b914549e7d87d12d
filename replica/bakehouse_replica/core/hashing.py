"""The one hash of token blocks, shared by prefix cache, routing and simulator.

A block's hash chains over everything before it, so equal hashes mean equal prefixes under an equal scope. Every
part is typed and length-prefixed: an adapter named like another tenant's salt never collides with it.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

HASH_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HashScope:
    """What must be equal for two requests to share blocks, besides their tokens. `key`: 0 to 64 secret bytes."""

    block_size: int
    model_digest: str
    key: bytes = b""
    adapter: str = ""
    salt: str = ""


def root_hash(scope: HashScope) -> bytes:
    """What the hash of a scope's first blocks chains onto."""
    root = hashlib.blake2b(digest_size=HASH_BYTES, key=scope.key)
    for kind, part in (("model", scope.model_digest), ("adapter", scope.adapter), ("salt", scope.salt)):
        encoded = part.encode()
        root.update(f"{kind}:{len(encoded)}:".encode() + encoded)
    root.update(f"block_size:{scope.block_size}".encode())
    return root.digest()


def _chained(parent: bytes, packed_block: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(parent + packed_block, digest_size=HASH_BYTES, key=key).digest()


def next_block_hash(parent: bytes, token_ids: Sequence[int], key: bytes) -> bytes:
    """The hash of one more full block after `parent`: `block_hashes`, one block at a time."""
    return _chained(parent, array("i", token_ids).tobytes(), key)


def block_hashes(token_ids: Sequence[int], scope: HashScope) -> list[bytes]:
    """The chained hashes of the *full* blocks of `token_ids`, `HASH_BYTES` each, first block first."""
    packed = array("i", token_ids).tobytes()
    block_bytes = scope.block_size * array("i").itemsize
    parent, hashes = root_hash(scope), []
    for begin in range(0, len(packed) - block_bytes + 1, block_bytes):
        parent = _chained(parent, packed[begin : begin + block_bytes], scope.key)
        hashes.append(parent)
    return hashes


def choice_seed(seed: int, choice: int) -> int:
    """The sampling seed of choice `choice`, a signed 64-bit int; choice 0 keeps `seed`.

    Hence an unfinished choice of a request with n > 1 resumes as a request with n = 1 and this seed.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)

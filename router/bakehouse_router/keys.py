"""The API keys of this server and the tenant that each names, from a file that is read again when it changes.

tenants:
  alice:
    keys: ["sk-alice-0123456789abcdef"]
  bob:
    keys: ["sha256:<64 hex digits of the key's SHA-256>"]    # the file then holds no secret
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import yaml
from bakehouse_replica.core.errors import ConfigError, Unauthenticated

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 1024 * 1024
MIN_KEY_CHARS = 16  # shorter ones can be guessed over the network
MAX_TENANT_CHARS = 128
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_Stamp = tuple[int, int, int]


class KeyRing:
    """Whose key is whose. Raises `ConfigError` where the file cannot be used at first.

    A later version that cannot be used changes nothing and is logged once: whoever was let in still is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Keys are looked up by a digest under this secret: how long a lookup takes tells nothing about any key.
        self._secret = secrets.token_bytes(32)
        self._stamp: _Stamp | None = _stamp_of(path)
        self._tenants = self._digests(read_keys(path))

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant whose key an `Authorization: Bearer …` header gives; raises `Unauthenticated`."""
        self._reread_if_changed()
        if not authorization:
            raise Unauthenticated("an API key is needed: Authorization: Bearer <key>")
        given = _BEARER.fullmatch(authorization.strip())
        if given is None:
            raise Unauthenticated("the Authorization header must be: Bearer <key>")
        digest = self._digest(hashlib.sha256(given[1].encode("utf-8", "surrogateescape")).digest())
        tenant = self._tenants.get(digest)
        if tenant is None:
            raise Unauthenticated("this API key is not known here")
        return tenant

    def _reread_if_changed(self) -> None:
        try:
            stamp = _stamp_of(self._path)
        except ConfigError:
            stamp = None
        if stamp == self._stamp:
            return
        self._stamp = stamp  # what is wrong with a version is said once
        try:
            self._tenants = self._digests(read_keys(self._path))
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("read %d keys from %s", len(self._tenants), self._path)

    def _digests(self, tenants: Mapping[bytes, str]) -> dict[bytes, str]:
        return {self._digest(hashed): tenant for hashed, tenant in tenants.items()}

    def _digest(self, hashed_key: bytes) -> bytes:
        return hmac.digest(self._secret, hashed_key, "sha256")


def read_keys(path: Path) -> dict[bytes, str]:
    """SHA-256 of each key → its tenant. Raises `ConfigError` naming what is wrong, never a key."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"gateway.keys: {path} has more than {MAX_FILE_BYTES} bytes, which is the limit")
        tree = yaml.safe_load(content)
    except OSError as error:
        raise ConfigError(f"gateway.keys: {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f" (line {where.line + 1})"
        raise ConfigError(f"gateway.keys: {path} is not YAML{line}") from error
    tenants = tree.get("tenants") if isinstance(tree, dict) and tree.keys() == {"tenants"} else None
    if not isinstance(tenants, dict):
        raise ConfigError(f"gateway.keys: {path} must hold one mapping, `tenants`: name → keys")
    found: dict[bytes, str] = {}
    for tenant, entry in tenants.items():
        for hashed in _hashed_keys(path, tenant, entry):
            if hashed in found:
                raise ConfigError(f"gateway.keys: {path}: a key of {tenant!r} is also one of {found[hashed]!r}")
            found[hashed] = tenant
    return found


def _hashed_keys(path: Path, tenant: object, entry: object) -> list[bytes]:
    if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT_CHARS or not tenant.isprintable():
        raise ConfigError(f"gateway.keys: {path}: a tenant's name must be printable text, not {tenant!r}")
    keys = entry.get("keys") if isinstance(entry, dict) and entry.keys() == {"keys"} else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"gateway.keys: {path}: tenants.{tenant} must be a mapping `keys`: list of texts")
    return [_hashed_key(path, tenant, index, key) for index, key in enumerate(keys)]


def _hashed_key(path: Path, tenant: str, index: int, key: str) -> bytes:
    if hashed := _HASHED.fullmatch(key):
        return bytes.fromhex(hashed[1])
    where = f"gateway.keys: {path}: tenants.{tenant}.keys[{index}]"
    if key.startswith("sha256:"):
        raise ConfigError(f"{where} must be sha256: and 64 lower-case hexadecimal digits")
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"{where} has {len(key)} characters; a key needs at least {MIN_KEY_CHARS}")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{where} has characters that no header carries; use printable ASCII without spaces")
    return hashlib.sha256(key.encode()).digest()


def _stamp_of(path: Path) -> _Stamp:
    """What changes when the file does, also where it is replaced behind a symbolic link."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"gateway.keys: {path}: {error.strerror}") from error
    return status.st_mtime_ns, status.st_size, status.st_ino

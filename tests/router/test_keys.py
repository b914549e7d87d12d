"""API keys: who is let in as whom, and what happens when the file changes."""

import hashlib
import os
from pathlib import Path

import pytest
from bakehouse_replica.core.errors import ConfigError, Unauthenticated
from bakehouse_router.keys import KeyRing, read_keys

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef"


def write(path: Path, text: str) -> Path:
    """Replace the file as editors and Kubernetes do: another inode under the same name."""
    made = path.with_suffix(".new")
    made.write_text(text)
    os.replace(made, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.yaml", f"tenants:\n  alice:\n    keys: [{ALICE}]\n")


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_a_key_names_its_tenant(path: Path) -> None:
    assert KeyRing(path).tenant_of(bearer(ALICE)) == "alice"


def test_a_hashed_key_needs_no_secret_in_the_file(tmp_path: Path) -> None:
    hashed = hashlib.sha256(BOB.encode()).hexdigest()
    path = write(tmp_path / "keys.yaml", f'tenants: {{bob: {{keys: ["sha256:{hashed}"]}}}}')
    assert KeyRing(path).tenant_of(bearer(BOB)) == "bob"
    with pytest.raises(Unauthenticated):
        KeyRing(path).tenant_of(bearer(f"sha256:{hashed}"))


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        ALICE,
        f"Basic {ALICE}",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        "Bearer é",
    ],
)
def test_anything_else_is_refused(path: Path, authorization: str | None) -> None:
    with pytest.raises(Unauthenticated):
        KeyRing(path).tenant_of(authorization)


def test_the_scheme_is_known_in_any_case(path: Path) -> None:
    assert KeyRing(path).tenant_of(f"bEARER  {ALICE} ") == "alice"


def test_a_changed_file_is_read_again(path: Path) -> None:
    ring = KeyRing(path)
    write(path, f"tenants: {{bob: {{keys: [{BOB}]}}}}")
    assert ring.tenant_of(bearer(BOB)) == "bob"
    with pytest.raises(Unauthenticated):
        ring.tenant_of(bearer(ALICE))


@pytest.mark.parametrize("text", ["tenants: [", "{}", ""])
def test_a_broken_change_keeps_the_keys_and_is_said_once(
    path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(path)
    write(path, text)
    assert [ring.tenant_of(bearer(ALICE)) for _ in range(3)] == ["alice"] * 3
    assert len(caplog.records) == 1
    write(path, f"tenants: {{bob: {{keys: [{BOB}]}}}}")
    assert ring.tenant_of(bearer(BOB)) == "bob"


def test_a_file_that_vanishes_keeps_the_keys(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ring = KeyRing(path)
    path.unlink()
    assert [ring.tenant_of(bearer(ALICE)) for _ in range(3)] == ["alice"] * 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tenants: [a", "is not YAML"),
        ("- a", "one mapping"),
        ("tenants: {}\nother: 1", "one mapping"),
        ("tenants: {a: [k]}", "tenants.a must be"),
        ("tenants: {a: {keys: short}}", "tenants.a must be"),
        ("tenants: {a: {keys: [short]}}", "has 5 characters; a key needs at least 16"),
        ("tenants: {a: {keys: ['0123456789 abcdef']}}", "printable ASCII"),
        ("tenants: {a: {keys: ['0123456789äbcdef']}}", "printable ASCII"),
        ("tenants: {a: {keys: ['sha256:12']}}", "64 lower-case"),
        ("tenants: {1: {keys: []}}", "printable text"),
        (f"tenants: {{a: {{keys: [{ALICE}]}}, b: {{keys: [{ALICE}]}}}}", "is also one of 'a'"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        read_keys(write(tmp_path / "keys.yaml", text))
    assert ALICE not in str(refused.value)


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.keys: .*No such file"):
        KeyRing(tmp_path / "keys.yaml")

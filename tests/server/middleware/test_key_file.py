"""The key file: what a running server reads again, and what it does with a damaged one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.middleware.auth import Keyring
from server.middleware.key_file import LOOK_SECONDS, KeyEntry, KeyFile, KeyFileError, new_key, read_keys, write_keys


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def later(file: KeyFile) -> None:
    """As if a second had passed since the last look."""
    file._looked -= LOOK_SECONDS


def test_a_key_is_stored_as_a_digest_and_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "keys.json"
    key, entry = new_key("ann", 10, None)
    write_keys(path, [entry])
    assert key not in path.read_text()
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert read_keys(path) == [entry]
    assert [*path.parent.iterdir()] == [path]


def test_keys_are_added_and_revoked_while_the_server_runs(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, entry = new_key("ann", 2, None)
    write_keys(path, [entry])
    file = KeyFile(path)
    keyring = Keyring({"fixed": "k"}, file)
    access = keyring.access(bearer(first))
    assert access is not None
    access.limit.admit()
    second, other = new_key("bob", None, None)
    write_keys(path, [entry, other])
    assert keyring.access(bearer(second)) is None  # not looked at yet
    later(file)
    found = keyring.access(bearer(second))
    assert found is not None
    assert found.tenant == "bob"
    assert keyring.access(bearer(first)) is access  # with what is left of its limits
    write_keys(path, [other])
    later(file)
    assert keyring.access(bearer(first)) is None
    fixed = keyring.access(b"Bearer k")
    assert fixed is not None
    assert fixed.tenant == "fixed"


def test_while_the_file_is_damaged_or_gone_the_last_keys_hold(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, entry = new_key("ann", None, None)
    write_keys(path, [entry])
    file = KeyFile(path)
    keyring = Keyring({}, file)
    path.write_text("{")
    later(file)
    assert keyring.access(bearer(key)) is not None
    path.unlink()
    later(file)
    assert keyring.access(bearer(key)) is not None


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json", [])
    keyring = Keyring({}, KeyFile(tmp_path / "keys.json"))
    assert keyring
    assert keyring.access(None) is None
    assert keyring.access(b"Bearer x") is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"keys": [{"tenant": "a b", "sha256": ""}]}', '{"keys": [], "more": 1}', '{"keys": 1}']
)
def test_what_is_no_key_file_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(KeyFileError, match="is no key file") as caught:
        KeyFile(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(KeyFileError, match="cannot be read"):
        KeyFile(tmp_path / "other.json")


def test_an_id_is_the_beginning_of_the_digest() -> None:
    assert KeyEntry("ann", "0123456789abcdef" * 4).id == "0123456789ab"

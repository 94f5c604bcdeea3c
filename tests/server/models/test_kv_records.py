"""Which models must have forgotten a session before its tombstone may go."""

from __future__ import annotations

from pathlib import Path

from server.models.kv_records import KvRecords


def records(folder: Path, forgotten: list[tuple[str, str, int]], *, remote: bool = False) -> KvRecords:
    return KvRecords(folder, ["a", "b", "c"], lambda *life: forgotten.append(life), remote=remote)


def with_kv(folder: Path, fingerprint: str) -> None:
    (folder / "kv" / fingerprint).mkdir(parents=True)


def test_a_session_is_forgotten_when_every_model_with_kv_has_told_so(tmp_path: Path) -> None:
    told: list[tuple[str, str, int]] = []
    first = records(tmp_path, told)
    for name in "ab":
        with_kv(tmp_path, f"f{name}")
        first.record_loaded(name, f"f{name}")
    first.forgotten("a", "t", "s", 1)
    assert told == []
    first.forgotten("b", "t", "s", 1)
    assert told == [("t", "s", 1)]
    first.forgotten("a", "t", "s", 2)  # another life of that name
    assert len(told) == 1


def test_a_model_that_was_loaded_before_the_last_start_is_waited_for(tmp_path: Path) -> None:
    told: list[tuple[str, str, int]] = []
    with_kv(tmp_path, "fb")
    records(tmp_path, told).record_loaded("b", "fb")
    second = records(tmp_path, told)
    assert second.others("a") == ["fb"]
    assert second.others("b") == []
    second.record_loaded("a", "fa")
    second.forgotten("a", "t", "s", 1)
    assert told == []
    (tmp_path / "kv" / "fb").rmdir()  # evicted: there is nothing to forget
    second.forgotten("a", "t", "s", 1)
    assert told == [("t", "s", 1)]


def test_kv_elsewhere_is_waited_for_without_a_folder(tmp_path: Path) -> None:
    told: list[tuple[str, str, int]] = []
    there = records(tmp_path, told, remote=True)
    there.record_loaded("a", "fa")
    there.record_loaded("b", "fb")
    there.forgotten("a", "t", "s", 1)
    assert told == []


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("[")
    assert records(tmp_path, []).others("a") == []
    (tmp_path / "models").write_text('{"b": 3}')
    assert records(tmp_path, []).others("a") == []

"""Packed weights that are kept between starts: the same bytes, or none."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import BF16, Q4_0, Q8_0
from gguf_models import written
from loaded_kit import check_generated, generate, load_quietly
from program_kit import compiled

from cache.compiler import private_folder
from cache.memory import huge
from cache.whole_files import CorruptFile, lock, write_file
from scheduler import tile_space
from scheduler.accel.cpu import kept_tiles, linear, matrix, tile_file
from scheduler.accel.cpu.kept_tiles import KeptTiles, TilePlace
from scheduler.accel.cpu.matrix import Matrix
from scheduler.accel.cpu.packed_matrix import PackedMatrix
from scheduler.accel.cpu.tile_file import SmallPages, TileFile, chunks, keeps_huge_pages
from scheduler.model.loader import LoadedModel
from scheduler.weights import known_files
from scheduler.weights.rounded_source import RoundedSource
from scheduler.weights.table_source import TableSource

WEIGHTS = [torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)) for rows in (70, 300, 1)]
PROMPTS = [[(7 * i + 3) % 250 for i in range(40)], list(range(10, 21))]


def map_small(fd: int, start: int, nbytes: int) -> torch.Tensor:
    """As ``huge.map_file``, whatever pages the file system has."""
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the files, all of which are worth keeping."""
    compiled()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huge, "map_file", map_small)
    monkeypatch.setattr(kept_tiles, "_WORTH", 0.0)
    private_folder()
    found = tile_space.folder()
    found.mkdir(mode=0o700)
    return found


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILE_CACHE_DIR", raising=False)


@dataclass
class Weight:
    """In tiles."""

    shape: tuple[int, int, int]
    kind: int
    data: torch.Tensor
    form: dict[str, Any] = field(default_factory=dict)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "lock")


def kept(kept: KeptTiles) -> None:
    """Write, and wait for it."""
    kept.keep()
    for thread in threading.enumerate():
        if thread.name == "keep packed weights":
            thread.join()


def packed(of: KeptTiles, weights: list[torch.Tensor] = WEIGHTS) -> list[PackedMatrix]:
    return [
        PackedMatrix(RoundedSource(weight, 4), place=TilePlace(of, str(number)))
        for number, weight in enumerate(weights)
    ]


def refused(*args: object) -> None:
    raise AssertionError("it was packed again")


def written_file(folder: Path) -> TileFile:
    first = Weight((1, 3, 5), 7, torch.arange(100).byte(), {"bits": 4, "table": [1, 2]})
    weights = {"a": first, "b": Weight((2, 2, 2), 8, torch.zeros(9000).byte())}
    write_file(folder, "x", chunks(weights))
    return TileFile(folder, "x")


def test_what_was_written_is_mapped(folder: Path) -> None:
    file = written_file(folder)
    first, second = file.table["a"], file.table["b"]
    assert [(one.shape, one.kind, one.nbytes) for one in (first, second)] == [((1, 3, 5), 7, 100), ((2, 2, 2), 8, 9000)]
    assert (first.form, second.form) == ({"bits": 4, "table": [1, 2]}, {})
    assert torch.equal(file.data(first), torch.arange(100).byte())
    assert not bool(file.data(second).any())
    assert [one.start % mmap.PAGESIZE for one in (first, second)] == [0, 0]
    assert file.nbytes == 9100
    assert (folder / "x").stat().st_size % huge.HUGE == 0


def test_weights_of_several_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_file, "_CHUNK", huge.HUGE)
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (5_000_000, 1, 0, 3_000_000)]
    parts = [bytes(part) for part in chunks({str(one.nbytes): Weight((1, 1, 1), 0, one) for one in data})]
    assert {len(part) for part in parts[:-2]} == {huge.HUGE}
    write_file(folder, "x", parts)
    file = TileFile(folder, "x")
    assert all(torch.equal(file.data(file.table[str(want.nbytes)]), want) for want in data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:5], "shorter than it was"),
        (lambda data: b"W" + data[1:], "of another form"),
        (lambda data: data[:60] + b"!" + data[61:], "not what was written"),  # the table
        (lambda data: data[: huge.HUGE + 9] + b"!" + data[huge.HUGE + 10 :], "not what was written"),
        (lambda data: data[: huge.HUGE + 9], "shorter than its table says"),
    ],
)
def test_a_file_that_is_not_what_was_written(change: Callable[[bytes], bytes], said: str, folder: Path) -> None:
    written_file(folder)
    (folder / "x").write_bytes(change((folder / "x").read_bytes()))
    with pytest.raises(CorruptFile, match=said):
        TileFile(folder, "x")


def test_small_pages_are_no_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_file(folder)
    monkeypatch.setattr(huge, "map_file", lambda *args: None)
    with pytest.raises(SmallPages):
        TileFile(folder, "x")
    assert not keeps_huge_pages(folder)


def test_a_file_in_huge_pages_is_mapped_in_them(tmp_path: Path) -> None:
    if not keeps_huge_pages(tmp_path):
        pytest.skip("files are in small pages here")
    write_file(tmp_path, "x", chunks({"a": Weight((1, 1, 1), 0, torch.ones(8 << 20, dtype=torch.uint8))}))
    file = TileFile(tmp_path, "x")
    data = file.data(file.table["a"])
    held, in_huge_pages = huge.resident(data)
    assert in_huge_pages == held == 8 << 20
    assert bool(data.all())


def test_the_next_start_maps_what_this_one_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first)
    assert first.nbytes == 0
    assert not any(one.kept for one in made)
    kept(first)
    (file,) = files(folder)
    assert file.name == "model-program.tiles"
    monkeypatch.setattr(PackedMatrix, "_copy", refused)
    second = KeptTiles("model", "program", None)
    again = packed(second)
    assert second.nbytes == sum(one.nbytes for one in made)
    for one, other in zip(made, again, strict=True):
        assert other.kept
        assert (one.kind, one.out, one.inside) == (other.kind, other.out, other.inside)
        assert torch.equal(one.data, other.data)
        assert torch.equal(one.dense(), other.dense())
    kept(second)  # does nothing
    assert [path.stat().st_ino for path in files(folder)] == [file.stat().st_ino]


def test_scales_that_are_no_halves_are_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = [WEIGHTS[0] * 1e-9]
    first = KeptTiles("model", "program", None)
    (made,) = packed(first, tiny)
    kept(first)
    monkeypatch.setattr(PackedMatrix, "_copy", refused)
    (again,) = packed(KeptTiles("model", "program", None), tiny)
    assert torch.equal(made.dense(), again.dense())


def test_another_model_or_program_packs_its_own(folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    assert made
    for names in (("other", "program"), ("model", "other")):
        assert not any(one.kept for one in packed(KeptTiles(*names, None)))
    second = KeptTiles("model", "other", None)
    made = packed(second)
    kept(second)
    assert made
    assert [path.name for path in files(folder)] == ["model-other.tiles"]  # the first is of no use any more


def test_a_weight_of_another_shape_is_packed(folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    assert made
    other = KeptTiles("model", "program", None)
    again = packed(other, [WEIGHTS[0], WEIGHTS[0], WEIGHTS[2], WEIGHTS[2]])
    assert [one.kept for one in again] == [True, False, True, False]
    want = PackedMatrix(RoundedSource(WEIGHTS[0], 4))
    assert torch.equal(again[1].dense(), want.dense())


def test_a_weight_of_the_same_size_is_packed(folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first, [torch.ones(64, 128)])
    kept(first)
    other = RoundedSource(torch.ones(128, 64), 4)
    again = PackedMatrix(other, place=TilePlace(KeptTiles("model", "program", None), "0"))
    assert again.data.nbytes == made[0].data.nbytes
    assert not again.kept
    assert torch.equal(again.dense(), PackedMatrix(other).dense())


@pytest.mark.parametrize("wrong", [{"bits": 8}, {"minima": False}, {"group": 16}])
def test_a_form_that_is_not_that_of_the_tiles(wrong: dict[str, Any], folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    (made,) = packed(first, [WEIGHTS[0]])
    write_file(
        folder, "model-program.tiles", chunks({"0": Weight(made.shape, made.kind, made.data, made.form | wrong)})
    )
    (again,) = packed(KeptTiles("model", "program", None), [WEIGHTS[0]])
    assert not again.kept
    assert torch.equal(again.dense(), made.dense())


@pytest.mark.parametrize("step", [1.0, 0.3])  # a table of whole numbers, and of others
def test_weights_of_a_table(step: float, folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (70, 64), dtype=torch.uint8, generator=generator)
    scales = torch.rand(70, 2, generator=generator).half().float()
    numbers = tuple(step * value for value in range(-8, 8))
    rows = (lambda start, stop: codes[start:stop]), (lambda start, stop: scales[start:stop])
    source = TableSource(*rows, (70, 64), 4, 32, numbers, codes.nbytes)
    first = KeptTiles("model", "program", None)
    made = PackedMatrix(source, place=TilePlace(first, "a"))
    kept(first)
    again = PackedMatrix(source, place=TilePlace(KeptTiles("model", "program", None), "a"))
    assert again.kept
    assert torch.equal(again.dense(), made.dense())
    torch.testing.assert_close(again.dense(), source.dequantise(0, 70))


def test_nothing_of_the_source_is_read(folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    assert made
    source = RoundedSource(WEIGHTS[0], 4)
    source.rows = refused  # type: ignore[method-assign,assignment]
    assert PackedMatrix(source, place=TilePlace(KeptTiles("model", "program", None), "0")).kept


def test_a_weight_that_was_not_used_is_not_kept(folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first)
    del made[1]
    kept(first)
    again = packed(KeptTiles("model", "program", None))
    assert [one.kept for one in again] == [True, False, True]
    assert torch.equal(again[2].dense(), made[1].dense())


def test_without_a_weight_that_is_used_nothing_is_kept(folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    packed(first).clear()
    kept(first)
    assert files(folder) == []


def test_what_is_asked_for_in_another_order_is_found_by_its_name(folder: Path) -> None:
    first, alike = KeptTiles("model", "program", None), [WEIGHTS[0], WEIGHTS[0] * 2, WEIGHTS[0] * 3]
    made = packed(first, alike)
    kept(first)
    second = KeptTiles("model", "program", None)
    again = [PackedMatrix(RoundedSource(alike[i], 4), place=TilePlace(second, str(i))) for i in (2, 0)]
    assert [one.kept for one in again] == [True, True]
    assert torch.equal(again[0].dense(), made[2].dense())
    assert torch.equal(again[1].dense(), made[0].dense())


def test_what_is_missing_in_the_file_is_added(folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first, WEIGHTS[:2])
    kept(first)
    second = KeptTiles("model", "program", None)
    again = packed(second)
    assert [one.kept for one in again] == [True, True, False]
    kept(second)
    third = packed(KeptTiles("model", "program", None))
    assert all(one.kept for one in third)
    assert all(torch.equal(one.dense(), other.dense()) for one, other in zip(again, third, strict=True))
    assert torch.equal(made[1].dense(), third[1].dense())


def test_linear_modules_with_plain_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled().tiles:
        pytest.skip("this processor has no use for tiles of bfloat16")
    monkeypatch.setattr(linear, "_pays", lambda *args: True)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(2)).bfloat16()

    def start() -> tuple[torch.nn.Module, KeptTiles]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))).bfloat16().requires_grad_(False)
        tiles = KeptTiles("model", "program", None)
        assert len(linear.pack(model, kept=tiles)) == 3
        return model, tiles

    model, tiles = start()
    want = model(x)
    kept(tiles)
    monkeypatch.setattr(matrix, "_tile", refused)
    model, tiles = start()
    assert tiles.nbytes == 3 * 512 * 512 * 2
    assert torch.equal(model(x), want)


@pytest.mark.parametrize(("flipped", "shape"), [(False, (130, 96)), (True, (64, 40))])
def test_tiles_of_plain_weights(
    flipped: bool, shape: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = weight.t() if flipped else weight
    first = KeptTiles("model", "program", None)
    made = Matrix(weight, True, place=TilePlace(first, "a"))
    kept(first)
    monkeypatch.setattr(matrix, "_tile", refused)
    again = Matrix(weight, True, place=TilePlace(KeptTiles("model", "program", None), "a"))
    assert again.kept
    assert torch.equal(again.data, made.data)
    assert torch.equal(again.dense(), weight)


def test_damage_is_packed_anew_and_mended(folder: Path) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    (file,) = files(folder)
    file.write_bytes(file.read_bytes()[:-1000] + bytes([1]) * 1000)
    data = bytearray(file.read_bytes())
    data[huge.HUGE] ^= 1
    file.write_bytes(bytes(data))
    second = KeptTiles("model", "program", None)
    again = packed(second)
    assert not any(one.kept for one in again)
    assert torch.equal(again[0].dense(), made[0].dense())
    kept(second)
    assert all(one.kept for one in packed(KeptTiles("model", "program", None)))


@pytest.mark.parametrize("why", ["nothing is kept", "little room", "small pages", "little time", "a locked folder"])
def test_what_is_not_kept(
    why: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmturn.engine")
    space = {"nothing is kept": 0, "little room": 1000}.get(why)
    if why == "small pages":
        monkeypatch.setattr(kept_tiles, "keeps_huge_pages", lambda folder: False)
    if why == "little time":
        monkeypatch.setattr(kept_tiles, "_WORTH", 1000.0)
    first = KeptTiles("model", "program", space)
    made = packed(first)
    held = lock(folder, 0.0) if why == "a locked folder" else None
    kept(first)
    if held is not None:
        os.close(held)
    assert made
    assert files(folder) == []
    said = {"little room": "--packed-space has 0.0", "small pages": "huge pages", "a locked folder": "not kept"}
    assert said.get(why, "") in caplog.text
    assert bool(caplog.text) is (why in said)


def test_a_folder_that_others_can_write_to_is_not_trusted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    assert made
    folder.chmod(0o777)
    caplog.set_level(logging.DEBUG, "warmturn.engine")
    second = KeptTiles("model", "program", None)
    again = packed(second)
    assert not any(one.kept for one in again)
    kept(second)
    assert "open to other users" in caplog.records[-1].message


def test_a_folder_of_the_operators_choice(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILE_CACHE_DIR", str(tmp_path / "volume"))
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    assert made
    assert files(folder) == []
    assert [path.name for path in files(tmp_path / "volume")] == ["model-program.tiles"]


def test_a_file_in_small_pages_stays_and_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    assert made
    (file,) = files(folder)
    monkeypatch.setattr(huge, "map_file", lambda *args: None)
    second = KeptTiles("model", "program", None)
    again = packed(second)
    assert not any(one.kept for one in again)
    number = file.stat().st_ino
    kept(second)
    assert [path.stat().st_ino for path in files(folder)] == [number]


def test_two_processes_that_start_together_write_once(folder: Path) -> None:
    both = [KeptTiles("model", "program", None) for _ in range(2)]
    made = [packed(one) for one in both]
    kept(both[0])
    (file,) = files(folder)
    number = file.stat().st_ino
    kept(both[1])
    assert made
    assert [path.stat().st_ino for path in files(folder)] == [number]


def test_which_files_are_packed_is_known(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_files, "_SETTLED", -1.0)
    path, digest = tmp_path / "x.gguf", "1" * 32
    path.write_bytes(b"weights")
    known_files.digest_of([known_files.OpenedFile(path, path.stat())], "config", lambda: digest)

    def tiles() -> str:
        known = known_files.known_of([path])
        assert known is not None
        return known.tiles

    first = KeptTiles("model", "program", None, digest)
    made = packed(first)
    assert tiles() == ""
    kept(first)
    assert made
    assert tiles() == "model-program.tiles"
    KeptTiles("model", "another", None, digest)
    assert tiles() == ""  # what is there is not used
    KeptTiles("model", "program", None, digest)
    assert tiles() == "model-program.tiles"


def test_a_user_without_a_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    assert made
    assert files(folder) == []


def test_a_writer_that_was_killed_leaves_nothing(folder: Path) -> None:
    (folder / ".0123.tmp").write_bytes(b"half of a file")
    first = KeptTiles("model", "program", None)
    made = packed(first)
    kept(first)
    assert made
    assert [path.name for path in files(folder)] == ["model-program.tiles"]
    (folder / ".0123.tmp").write_bytes(b"half of a file")
    KeptTiles("model", "program", None)
    assert [path.name for path in files(folder)] == ["model-program.tiles"]


def start(path: Path, **options: Any) -> LoadedModel:
    loaded = load_quietly(path, **options)
    assert loaded.packing is not None
    assert loaded.packing.kept is not None
    return loaded


@pytest.mark.parametrize(
    ("label", "kind"), [("llama", Q4_0), ("qwen3moe", Q8_0), ("qwen3next", Q8_0), ("qwen3moe", BF16)]
)
def test_a_model_says_the_same_from_kept_weights(
    label: str, kind: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, want = written(tmp_path / "x.gguf", label, kind)
    verdicts = str(tmp_path / "verdicts")
    first = start(path, verdicts=verdicts)
    said = generate(first, PROMPTS, 12)
    first.keep_packed()
    kept(KeptTiles("of nobody", "", 0))
    assert len(files(folder)) == 1
    monkeypatch.setattr(PackedMatrix, "_copy", refused)
    second = start(path, verdicts=verdicts)
    assert second.packing is not None
    assert second.packing.kept is not None
    assert second.packing.kept.nbytes > 0
    assert second.digest == first.digest
    assert "as before" in second.verdict.report
    assert generate(second, PROMPTS, 12) == said
    check_generated(second, PROMPTS, 12, want)

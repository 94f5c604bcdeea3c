"""How many threads compute: no more than may run, no more than have something to do, and what the user says."""

from collections.abc import Iterator

import pytest
import torch

from scheduler import cgroups, cores


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch would use, on four processors, and nobody says otherwise."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "processors", lambda: 4.0)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("allowed", "ranks", "threads"), [(4.0, 1, 4), (2.9, 1, 2), (0.5, 1, 1), (4.0, 2, 2), (4.0, 8, 1)]
)
def test_as_many_as_may_run(monkeypatch: pytest.MonkeyPatch, allowed: float, ranks: int, threads: int) -> None:
    monkeypatch.setattr(cores, "processors", lambda: allowed)
    cores.share(ranks)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("mebibytes", "threads"), [(1, 1), (17, 2), (100, 4)])
def test_as_many_as_have_something_to_do(mebibytes: int, threads: int) -> None:
    cores.fit(torch.nn.Linear(1024, 256 * mebibytes, bias=False, device="meta"))
    assert torch.get_num_threads() == threads


def test_quantised_weights_are_buffers() -> None:
    model = torch.nn.Module()
    model.register_buffer("qweight", torch.empty(17 << 20, dtype=torch.uint8, device="meta"))
    cores.fit(model)
    assert torch.get_num_threads() == 2


def test_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(cores, "processors", lambda: 1.0)
    cores.share(2)
    cores.fit(torch.nn.Linear(2, 2))
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("limit", "allowed"), [(None, 64.0), (0.5, 0.5), (100.0, 64.0)])
def test_processors_within_cgroups(monkeypatch: pytest.MonkeyPatch, limit: float | None, allowed: float) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cgroups, "processor_limit", lambda: limit)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64), raising=False)
    assert cores.processors() == allowed

"""A step that calls what a forward calls: the same logits, and no recording of what cannot be repeated."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from architectures.build import build
from program_kit import compiled
from stage_kit import LONG, STEPS, Stage
from tiny_models import logits, make_model
from torch import nn
from wide import widely

from scheduler.accel.cpu.fusion import Fusion
from scheduler.accel.cpu.position_table import PositionTable
from scheduler.accel.cpu.program import Program
from scheduler.accel.cpu.recorded_forward import RecordedForward, record_forward
from scheduler.accel.cpu.recorder import Unrecordable
from scheduler.forward.modes import PackedMode

MODELS = ("llama", "gemma3", "lfm2_moe", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "cohere2", "gpt_oss")


class Layer(nn.Module):
    """One of a chain of two; ``whole``: whether the chain can run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.behind: Layer | None = None
        self.whole = True
        self.ready: torch.Tensor | None = None
        self.runs = 0

    def run_ahead(self, wanted: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
        assert self.behind is not None
        self.runs += self.whole
        found: torch.Tensor = self.behind.inner(self.inner(x))
        return None if not self.whole else found if wanted is None else found[:, wanted]

    def run_some(self, wanted: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        self.runs += self.whole
        return self.inner(x)[:, wanted] if self.whole else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.behind is not None:
            one: torch.Tensor = self.inner(x)
            self.behind.ready = self.behind.inner(one)
            return one
        found, self.ready = self.ready, None
        return self.inner(x) if found is None else found


class Chained(NamedTuple):
    """A layer as a chain has it."""

    module: nn.Module
    run_ahead: Any
    run_some: Any
    layer: Layer

    @property
    def ready(self) -> torch.Tensor | None:
        return self.layer.ready


class Keeper(nn.Module):
    """Keeps what it gets first in a mapping, and adds that to what it gets next."""

    def forward(self, x: torch.Tensor, kept: MutableMapping[str, torch.Tensor]) -> torch.Tensor:
        return x + kept.setdefault("first", x)


class Norm(nn.Module):
    """Behind the layers; ``mixes``: rows are not computed alone."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.mixes = mixes
        self.rows = 0  # of its latest call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x.shape[1]
        return x - x.mean(dim=(1, 2) if self.mixes else 2, keepdim=True)


def _plainly(model: Model, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    last: torch.Tensor = model.norm(model.second(model.first(hidden)))
    return last[:, keep]


class Model(nn.Module):
    """``between`` is what the forward does between its embedding and its layers, ``end`` what it does from there on."""

    def __init__(
        self,
        between: Callable[[Model, torch.Tensor], torch.Tensor],
        end: Callable[[Model, torch.Tensor, torch.Tensor], torch.Tensor] = _plainly,
    ) -> None:
        super().__init__()
        self.embedding, self.first, self.second, self.norm = nn.Embedding(10, 4), Layer(), Layer(), Norm()
        self.first.behind = self.second
        self.table, self.keeper = torch.arange(4.0), Keeper()
        self.between, self.end = between, end
        self.own = 0

    def forward(self, ids: torch.Tensor, keep: torch.Tensor, flag: bool = True) -> Any:
        self.own += 1
        return SimpleNamespace(logits=self.end(self, self.between(self, self.embedding(ids)), keep))


def _keep(model: Model, x: torch.Tensor, kept: MutableMapping[str, torch.Tensor]) -> torch.Tensor:
    twice: torch.Tensor = model.keeper(model.keeper(x, kept) * 3, kept)
    return twice


def inputs(count: int, **others: Any) -> dict[str, Any]:
    return {"ids": torch.arange(count)[None] % 10, "keep": torch.tensor([count - 1]), "flag": True, **others}


def recorded(model: Model) -> RecordedForward:
    def steps(count: int) -> Iterator[None]:
        for length in (3, 2, 7)[:count]:
            model(**inputs(length))
            yield

    return record_forward(
        model, [[Chained(one, one.run_ahead, one.run_some, one) for one in (model.first, model.second)]], steps
    )


REPEATED: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda model, x: x,
    "functions of what was called": lambda model, x: torch.cat([x[..., 2:], x[..., :2]], dim=-1) * 2,
    "what nothing needs": lambda model, x: (torch.arange(x.shape[1]) + model.table.sum(), x)[1],
    "shapes": lambda model, x: x * x.shape[-1] if x.dim() == 3 else x,
    "a view by length": lambda model, x: x.reshape(*x.shape[:2], 2, 2).view(x.shape[1], 4)[None],
    "a mapping that modules share": lambda model, x: _keep(model, x, UserDict()) + _keep(model, x, {}),
    "several results": lambda model, x: x.chunk(2, -1)[1].repeat(1, 1, 2),
}
REFUSED: dict[str, tuple[Callable[[Model, torch.Tensor], torch.Tensor], str]] = {
    "the length": (lambda model, x: x * x.shape[1], "different functions"),
    "a choice by length": (lambda model, x: x * 2 if x.shape[1] > 4 else x, "different functions"),
    "values read": (lambda model, x: x if x.sum() > 1e9 else x * 2, "__bool__"),
    "a value as a number": (lambda model, x: x * x[0, 0, 0].item(), "item"),
    "in place": (lambda model, x: x.add_(1), "add_"),
    "a view of other sizes": (
        lambda model, x: x.reshape(2, 2 * x.shape[1], -1).reshape(1, x.shape[1], 4),
        "different functions",
    ),
    "a mapping with something in it": (lambda model, x: model.keeper(x, UserDict(first=x)), "another UserDict"),
    "an operator in place": (lambda model, x: _doubled(x), "mul_"),
    "rows set": (lambda model, x: _first_row_zero(x), "__setitem__"),
    "a result to write to": (lambda model, x: torch.add(x, 1, out=torch.empty_like(x)), "add"),
    "a tensor of the model": (lambda model, x: x + model.table, "another Tensor"),
    "layers called otherwise": (lambda model, x: model.second(x), "at once"),
}


def _doubled(x: torch.Tensor) -> torch.Tensor:
    x *= 2
    return x


def _first_row_zero(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 0
    return x


@torch.no_grad()
@pytest.mark.parametrize("name", REPEATED)
def test_what_is_called_is_called_with_other_tensors(name: str) -> None:
    model = Model(REPEATED[name])
    found, before = recorded(model), model.own
    for count in (1, 9):
        given = inputs(count)
        got = found.run(given)
        assert model.own == before
        assert got is not None
        assert torch.equal(got, model(**given).logits)
        before = model.own
    assert all("_compiled_call_impl" not in vars(one) and "forward" not in vars(one) for one in model.modules())


def _twice(model: Model, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    last: torch.Tensor = model.norm(model.second(model.first(hidden)))
    return (last + last.mean())[:, keep]


def _through(model: Model, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    one = model.first(hidden)
    last: torch.Tensor = model.norm(model.second(one)) + one
    return last[:, keep]


def _whole(model: Model, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    last: torch.Tensor = model.norm(model.second(model.first(hidden)))
    return last[..., :2]


ENDS = {"rows alone": _plainly, "rows that are mixed": _plainly, "another use": _twice, "all rows": _whole}


@torch.no_grad()
@pytest.mark.parametrize("name", ENDS)
def test_rows_are_chosen_before_what_is_done_for_each_alone(name: str) -> None:
    model = Model(REPEATED["nothing"], ENDS[name])
    model.norm.mixes = name == "rows that are mixed"
    found, given = recorded(model), inputs(9, keep=torch.tensor([8, 2]))
    want = model(**given).logits
    got = found.run(given)
    assert got is not None
    assert torch.equal(got, want)
    assert model.norm.rows == (2 if name == "rows alone" else 9)


@torch.no_grad()
def test_a_chain_runs_layer_by_layer_where_a_result_between_is_needed() -> None:
    model = Model(REPEATED["nothing"], _through)
    found, given = recorded(model), inputs(9)
    model.first.runs = 0
    got = found.run(given)
    assert got is not None
    assert torch.equal(got, model(**given).logits)
    assert not model.first.runs


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_refused(name: str) -> None:
    between, why = REFUSED[name]
    model = Model(between)
    with pytest.raises(Unrecordable, match=why):
        recorded(model)
    assert all("_compiled_call_impl" not in vars(one) and "forward" not in vars(one) for one in model.modules())


@torch.no_grad()
def test_a_chain_that_cannot_run_is_called_layer_by_layer() -> None:
    """The last one for some rows, where it can."""
    model = Model(REPEATED["nothing"])
    found, given, embedded = recorded(model), inputs(5), []
    want = model(**given).logits
    model.embedding.register_forward_hook(lambda *_: embedded.append(1))
    model.first.whole, model.first.runs = False, 0
    model.first.forward = model.first.inner.forward  # type: ignore[method-assign, assignment]
    for whole in (True, False):
        model.second.whole, model.second.runs = whole, 0
        got = found.run(given)
        assert got is not None
        assert torch.equal(got, want)
        assert (len(embedded), model.first.runs) == (1, 0)  # what was called before is not called again
        assert (model.second.runs, model.norm.rows) == ((1, 1) if whole else (0, 5))
        embedded.clear()


@torch.no_grad()
def test_other_arguments_and_hooks_of_opened_modules_run_the_model_itself() -> None:
    model = Model(REPEATED["nothing"])
    found = recorded(model)
    assert found.run(inputs(3)) is not None
    assert found.run(inputs(3, flag=False)) is None
    assert found.run(inputs(3, more=None)) is None
    assert found.run(inputs(3, keep=slice(None))) is None
    assert found.run(inputs(3, flag=torch.ones(3))) is None
    assert found.run(inputs(3, ids=torch.zeros(1, 1, 3, dtype=torch.int64))) is None  # as positions of pictures have
    forward = model.forward
    model.forward = forward  # type: ignore[method-assign]
    assert found.run(inputs(3)) is None
    del model.forward
    hook = model.register_forward_pre_hook(lambda *_: None)
    assert found.run(inputs(3)) is None
    hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert found.run(inputs(3)) is None
    finally:
        hook.remove()


def _recorded_runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was one of recorded calls."""
    original, runs = RecordedForward.run, list[bool]()

    def run(one: RecordedForward, given: Any, whole: bool) -> torch.Tensor | None:
        found = original(one, given, whole)
        runs.append(found is not None)
        return found

    monkeypatch.setattr(RecordedForward, "run", run)
    return runs


@torch.no_grad()
@pytest.mark.parametrize("name", widely(MODELS, "llama qwen3_moe qwen3_5_text"))
def test_models_say_what_they_said(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Steps of several sessions, prompts and single tokens, hybrids whose states move on once per step."""
    compiled()
    model = build(name, "causal")
    want = [logits(model, ids) for ids in LONG]
    runs = _recorded_runs(monkeypatch)
    stage = Stage(model)
    runs.clear()
    alone = Mock(side_effect=Program.run_some)
    monkeypatch.setattr(Program, "run_some", lambda *given: alone(*given))
    got = stage.run(LONG, STEPS)
    assert runs == [True] * len(STEPS)
    for one, other in zip(got, want, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())
    few = stage.run(LONG, STEPS, last=True)
    stage.fusion.unrecord()
    assert all(map(torch.equal, got, stage.run(LONG, STEPS)))
    assert all(map(torch.equal, few, stage.run(LONG, STEPS, last=True)))
    found = [len(call.args[3]) for call in alone.call_args_list]
    assert found in ([len(step) for step in STEPS[:4]], [2, 3])  # experts may take few rows at once


@torch.no_grad()
@pytest.mark.parametrize(("name", "tables"), [("llama", 1), ("qwen3_moe", 1), ("gemma3", 0)])
def test_rotary_embeddings_are_read_from_tables(monkeypatch: pytest.MonkeyPatch, name: str, tables: int) -> None:
    """Not where a chain takes what the modules have returned."""
    compiled()
    calls = Mock(side_effect=PositionTable.__call__)
    monkeypatch.setattr(PositionTable, "__call__", lambda *args, **kwargs: calls(*args, **kwargs))
    stage = Stage(build(name, "causal"))
    calls.reset_mock()
    stage.run(LONG, STEPS)
    assert calls.call_count == tables * len(STEPS)


@torch.no_grad()
def test_a_recording_that_is_not_right_goes_and_chains_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    model = make_model("llama")
    want = [logits(model, ids) for ids in LONG]
    original = Fusion.run
    monkeypatch.setattr(Fusion, "run", lambda *given: None if (out := original(*given)) is None else out.roll(1, -1))
    stage = Stage(model)
    assert isinstance(stage.mode, PackedMode)
    assert stage.mode.fusion is not None
    assert stage.mode.fusion._recorded is None
    assert stage.chains == [len(model.model.layers)]
    for one, other in zip(stage.run(LONG, STEPS), want, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())

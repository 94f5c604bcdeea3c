"""Packed weights: the same numbers, only where it pays, and back again to the bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loaded_kit import load_quietly
from program_kit import compiled
from tiny_models import MODES, TWO_PARTS, logits, make_model, save_model
from torch import nn
from transformers.pytorch_utils import Conv1D
from wide import widely

from cache.pages.layers import AttentionLayer, read_layers
from scheduler.accel.cpu import linear
from scheduler.accel.cpu.linear import pack
from scheduler.accel.cpu.packing import Packing
from scheduler.forward.rope import LongRope
from scheduler.model import loader
from scheduler.model.loader import LoadFailed, fingerprint
from scheduler.model.measurement import describe
from scheduler.model.probe import UnsupportedModel, probe
from scheduler.model.verdict import Verdict
from scheduler.weights.stand_in import WeightStandIn

PROMPT = list(range(60, 90))
NARROW = "llama gemma3 qwen3_next falcon bloom"  # of KV, windows and states, and of the other modes
BIG = 320  # a square of it is large enough to be looked at


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing pays, however small the weight."""
    monkeypatch.setattr(linear, "SMALLEST", 1)
    for name in ("_MOST", "_MOST_TILED"):
        monkeypatch.setattr(linear, name, dict.fromkeys(getattr(linear, name), float("inf")))


@pytest.fixture(params=["_tile", "_reorder"])
def way(request: pytest.FixtureRequest, always: None, monkeypatch: pytest.MonkeyPatch) -> str:
    ways = linear._ways

    def only(dtype: torch.dtype) -> Iterator[Any]:
        return (one for one in ways(dtype) if one.__name__ == request.param)

    monkeypatch.setattr(linear, "_ways", only)
    return str(request.param)


def packed_in(model: nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if isinstance(weight, WeightStandIn)]


def filled(module: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Random weights and biases."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.1)
    return module.to(dtype).eval()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


# -- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_form_of_input_gives_what_it_gave(dtype: torch.dtype, bias: bool) -> None:
    if not list(linear._ways(dtype)):
        pytest.skip("there is no such way on this machine")
    module = filled(nn.Linear(48, 80, bias=bias), dtype)
    weight, added = module.weight.detach().clone(), module.bias
    assert len(pack(module)) == 1
    wide = random(5, 96, dtype=dtype)
    for x in (
        wide[:, :48].clone(),
        wide[0, :48].clone(),
        wide[:, 7:55],
        wide[:, ::2],
        random(48, 5, dtype=dtype).t(),
        random(2, 3, 48, dtype=dtype).transpose(0, 1),
        random(1, 1, 48, dtype=dtype).expand(3, 4, 48),
        random(0, 48, dtype=dtype),
        random(1, 0, 48, dtype=dtype),
    ):
        with torch.inference_mode():
            got = module(x)
        want = F.linear(x, weight, added)
        assert (got.shape, got.dtype) == (want.shape, dtype)
        assert bool(((got - want).abs() <= 2 * linear._allowed_error(dtype) * want.abs().amax(-1, keepdim=True)).all())


@pytest.mark.usefixtures("way")
def test_an_input_of_another_type_or_width_is_an_error_still() -> None:
    module = filled(nn.Linear(48, 80), torch.bfloat16)
    if not list(linear._ways(torch.bfloat16)):
        pytest.skip("there is no such way on this machine")
    assert len(pack(module)) == 1
    for x in (random(2, 48), random(2, 40, dtype=torch.bfloat16), random(2, 24, dtype=torch.bfloat16)):
        with torch.no_grad(), pytest.raises(RuntimeError):
            module(x)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", widely([name for name in MODES if name not in TWO_PARTS], NARROW))
def test_a_packed_model_says_what_it_said_and_runs_in_the_same_mode(name: str) -> None:
    model = make_model(name)
    want = logits(model, PROMPT)
    packing = pack(model)
    assert len(packing) == len(packed_in(model)) >= 4
    layers = read_layers(model.config.get_text_config(decoder=True))
    verdict = probe(model, layers, 4, LongRope(model), packing=packing)
    verdict.mode.remove()
    assert describe(verdict.mode) == MODES[name], verdict.report
    assert (logits(model, PROMPT) - want).abs().max() < 1e-4 * want.abs().max()


# -- what is packed -------------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.01


class Clamped(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.clamp(-50, 50))


class Upcast(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.double(), self.weight.double())


class Pair(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), None


class Own(nn.Linear):
    """A linear map written in other words."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + self.bias


class Quantised(torch.Tensor):
    """A weight of a class of its own."""


def quantised() -> nn.Module:
    module = nn.Linear(BIG, BIG)
    module.weight = nn.Parameter(torch.randn(BIG, BIG).as_subclass(Quantised), requires_grad=False)
    return module


def hooked() -> nn.Module:
    module: Any = nn.Linear(BIG, BIG)
    forward = module.forward
    module.forward = lambda x: forward(x)
    return module  # type: ignore[no-any-return]


def scaled_by_a_buffer() -> nn.Module:
    module = nn.Linear(BIG, BIG)
    module.register_buffer("scale", torch.ones(1))
    return module


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "module", [nn.Linear(BIG, 96), nn.Linear(BIG, BIG, bias=False), Conv1D(BIG, BIG), Conv1D(96, BIG), Own(BIG, 96)]
)
def test_linear_maps_are_packed_by_what_they_do(module: nn.Module) -> None:
    filled(module)
    x = random(2, 3, BIG)
    with torch.no_grad():
        want = module(x)
        assert len(pack(module)) == 1
        torch.testing.assert_close(module(x), want, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "module",
    [
        Scaled(BIG, BIG),
        Clamped(BIG, BIG),
        Upcast(BIG, BIG),
        Pair(BIG, BIG),
        nn.Linear(BIG, BIG).double(),
        nn.Linear(BIG, BIG, device="meta"),
        nn.Embedding(BIG, BIG),
        nn.utils.parametrizations.weight_norm(nn.Linear(BIG, BIG)),
        nn.Bilinear(8, 8, 8),
        quantised(),
        hooked(),
        scaled_by_a_buffer(),
    ],
)
def test_what_is_no_plain_linear_map_is_left_alone(module: nn.Module) -> None:
    before = dict(vars(module))
    assert len(pack(module)) == 0
    assert vars(module) == before
    assert not packed_in(module)


@pytest.mark.parametrize(
    ("times", "packs"),
    [({1: 0.9, 256: 1.0}, True), ({1: 1.0, 256: 0.5}, False), ({1: 0.5, 256: 1.3}, False)],
)
def test_what_does_not_pay_is_left_alone(times: dict[int, float], packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "scheduler.accel.cpu.packing._ratio", lambda plain, packed, x, evicting: times.get(x.shape[1], 2.0)
    )
    module = filled(nn.Linear(BIG, BIG))
    weight = module.weight
    assert len(pack(module)) == packs
    assert (module.weight is weight) == (not packs)


def test_a_prefill_may_cost_more_in_tiles_than_in_onednns_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {1: 0.9, 256: 1.2}
    monkeypatch.setattr("scheduler.accel.cpu.packing._ratio", lambda plain, packed, x, evicting: ratios[x.shape[1]])
    for name, pays in (("_tile", True), ("_reorder", False)):
        packs = getattr(linear, name)
        monkeypatch.setattr(linear, name, lambda matrix, bias, place, packs=packs: packs(matrix, bias, place))
        monkeypatch.setattr(linear, "_ways", lambda dtype, name=name: iter([getattr(linear, name)]))
        if name == "_tile" and not compiled().tiles:
            continue
        assert len(pack(filled(nn.Linear(BIG, BIG), torch.bfloat16))) == pays


def test_a_small_part_of_the_weights_may_be_slower_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every layer that has one would run as it is."""
    slow = 2 * BIG  # twice as slow is what takes inputs so wide
    monkeypatch.setattr("scheduler.accel.cpu.packing._ratio", lambda plain, packed, x, _: 1 + (x.shape[-1] == slow))
    monkeypatch.setattr(linear, "_ways", lambda dtype: iter((linear._tile,)))
    for others, packed in ((40, 42), (2, 2)) if compiled().tiles else ():
        model = nn.Sequential(nn.Linear(slow, BIG), nn.Linear(slow, BIG), *(nn.Linear(BIG, BIG) for _ in range(others)))
        assert len(pack(filled(model, torch.bfloat16))) == packed


def test_tiles_come_first() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ways = [way.__name__ for way in linear._ways(dtype)]
        tiled = compiled().tiles and dtype is torch.bfloat16
        assert ways == ["_tile"] * tiled + ["_reorder"] * (dtype in linear._dtypes())


@pytest.mark.usefixtures("always")
def test_without_a_kernel_of_ours_onednn_packs_and_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "kernel", lambda: None)
    module = filled(nn.Linear(BIG, BIG))
    packing = pack(module)
    assert len(packing) == (torch.float32 in linear._dtypes())
    assert packing.matrix(module) is None
    monkeypatch.setattr(linear, "SMALLEST", 1 << 16)
    assert pack(filled(nn.Linear(48, 80))).matrix(module) is None


@pytest.mark.usefixtures("always")
def test_types_that_onednn_does_not_multiply_here_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_dtypes", lambda: {torch.bfloat16})
    assert len(pack(filled(nn.Linear(BIG, BIG), torch.float16))) == 0
    assert len(pack(filled(nn.Linear(BIG, BIG)))) == 0


@pytest.mark.parametrize("make", [lambda: nn.Linear(128, 64), lambda: Conv1D(64, 128)])
def test_small_weights_are_not_even_measured_but_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    monkeypatch.setattr("scheduler.accel.cpu.packing._ratio", lambda *_: pytest.fail("measured"))
    module = filled(make())
    packing = pack(module)
    assert len(packing) == 0
    found = packing.matrix(module)
    assert found is not None
    matrix, bias = found
    assert (matrix.out, matrix.inside, matrix.limit) == (64, 128, None)
    assert bias is module.bias
    flipped = isinstance(module, Conv1D)
    assert torch.equal(matrix.dense(), module.weight.t() if flipped else module.weight)
    assert (matrix.data.data_ptr() == module.weight.data_ptr()) == (not flipped)


@pytest.mark.parametrize(
    ("ratios", "limit"),
    [({1: 0.5, 4: 0.9, 16: 1.2}, 4), ({1: 1.1, 4: 1.0, 16: 1.0}, 16), ({1: 1.2, 4: 0.5, 16: 0.5}, None)],
)
def test_a_plain_weight_is_read_for_as_many_rows_as_that_pays(
    ratios: dict[int, float], limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    monkeypatch.setattr(linear, "_ways", lambda dtype: iter(()))
    monkeypatch.setattr("scheduler.accel.cpu.packing._ratio", lambda plain, reading, x, evicting: ratios[x.shape[1]])
    module = filled(nn.Linear(BIG, BIG))
    packing = pack(module)
    assert len(packing) == 0
    assert not packed_in(module)
    found = packing.matrix(module)
    assert (found[0].limit if found else None) == limit
    assert found is None or found[0].data.data_ptr() == module.weight.data_ptr()


def test_what_was_measured_once_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways to multiply differ in the last bit: a model must say the same after a restart, on however busy a machine."""
    compiled()
    answers: dict[str, bool] = {}
    for ratio in (0.5, 9.0):
        monkeypatch.setattr("scheduler.accel.cpu.packing._ratio", lambda *_, ratio=ratio: ratio)
        assert len(pack(filled(nn.Linear(BIG, BIG)), answers)) == 1
    assert len(pack(filled(nn.Linear(BIG, BIG + 64)), answers)) == 0  # another shape is measured
    assert set(answers.values()) == {True, False}


def test_a_large_weight_that_lies_the_other_way_round_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_ways", lambda dtype: iter(()))
    monkeypatch.setattr("scheduler.accel.cpu.packing._ratio", lambda *_: 0.5)
    module = filled(Conv1D(BIG, BIG))
    assert pack(module).matrix(module) is None


@pytest.mark.parametrize("module", [Scaled(32, 32), Clamped(32, 32), nn.Embedding(32, 32)])
def test_what_is_no_linear_map_is_not_read(module: nn.Module) -> None:
    assert pack(filled(module)).matrix(module) is None


@pytest.mark.usefixtures("always")
def test_one_that_would_say_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(4))

    def mostly(matrix: torch.Tensor, bias: torch.Tensor | None, _: Any) -> Any:
        return linear._reorder(matrix * 1.01 if next(made) == 2 else matrix, bias, None)

    monkeypatch.setattr(linear, "_ways", lambda dtype: iter([mostly]))
    model = filled(nn.Sequential(*(nn.Linear(BIG, BIG) for _ in range(4))))
    assert len(pack(model)) == 3
    assert packed_in(model) == ["0.weight", "1.weight", "3.weight"]


# -- who else reads a weight ----------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Two linear maps; the weight of the second is used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(BIG, BIG)
        self.second = nn.Linear(BIG, BIG)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.first(x).to(self.first.weight.dtype), self.second.weight[:16], self.second.bias[:16])


@torch.no_grad()
def test_a_weight_that_is_read_elsewhere_is_right_and_unpacked_later(way: str) -> None:
    if not list(linear._ways(torch.bfloat16)):
        pytest.skip("there is no such way on this machine")
    model = filled(Reader(), torch.bfloat16)
    x = random(3, BIG, dtype=torch.bfloat16)
    want = model(x)
    packing = pack(model)
    assert packed_in(model) == ["first.weight", "second.weight"]
    torch.testing.assert_close(model(x), want, atol=0.1, rtol=1e-2)
    packing.settle()
    assert packed_in(model) == ["first.weight"]  # asking for a type does no harm
    assert len(packing) == 1
    assert (packing.matrix(model.first) is not None) == (way == "_tile")
    assert packing.matrix(model.second) is None
    torch.testing.assert_close(model(x), want, atol=0.1, rtol=1e-2)


@pytest.mark.usefixtures("always")
def test_a_packed_weight_cannot_be_written() -> None:
    module = filled(nn.Linear(BIG, BIG))
    pack(module)
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be written"):
        module.weight.mul_(2)


@pytest.mark.usefixtures("always")
def test_what_describes_a_weight_describes_a_packed_one() -> None:
    module = filled(nn.Linear(BIG, 96), torch.bfloat16)
    pack(module)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type, weight.requires_grad) == (
        (96, BIG),
        torch.bfloat16,
        "cpu",
        False,
    )
    assert sum(p.numel() for p in module.parameters()) == 96 * BIG + 96


# -- memory and the way back ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
def test_the_plain_weight_is_not_kept() -> None:
    module = filled(nn.Linear(BIG, BIG))
    plain = weakref.ref(module.weight)
    pack(module)
    gc.collect()
    assert plain() is None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("tied", [False, True])
def test_files_that_the_weights_came_from_are_left(tied: bool, tmp_path: Path) -> None:
    load_model = type(make_model("llama")).from_pretrained
    config = make_model("llama").config
    config.tie_word_embeddings = tied
    model = load_model(save_model("llama", tmp_path), config=config)
    assert any(not weight.untyped_storage().resizable() for weight in model.parameters())
    pack(model)
    plain = [weight for weight in model.parameters() if not isinstance(weight, WeightStandIn)]
    assert plain
    assert all(weight.untyped_storage().resizable() for weight in plain)


@pytest.mark.parametrize("make", [lambda: nn.Linear(BIG, 96), lambda: Conv1D(96, BIG)])
def test_the_way_back_is_exact(make: Any, way: str) -> None:
    module = filled(make(), torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    packing = pack(module)
    assert len(packing) == len(list(linear._ways(torch.bfloat16)))
    if packing:  # else our kernel may read the plain weight, where that is faster
        assert (packing.matrix(module) is not None) == (way == "_tile")
    packing.remove()
    assert packing.matrix(module) is None
    assert "forward" not in vars(module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.usefixtures("always")
def test_tied_weights_are_tied_again() -> None:
    model = make_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    packing = pack(model)
    assert isinstance(model.lm_head.weight, WeightStandIn)
    assert not isinstance(model.model.embed_tokens.weight, WeightStandIn)
    packing.remove()
    assert model.lm_head.weight is model.model.embed_tokens.weight


# -- loading --------------------------------------------------------------------------------------------------------


def test_packing_changes_neither_fingerprint_nor_size(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = save_model("llama", tmp_path)
    plain = load_quietly(path)
    assert not packed_in(plain.model)
    request.getfixturevalue("always")
    packed = load_quietly(path)
    assert packed_in(packed.model)
    assert fingerprint(packed) == fingerprint(plain)
    assert packed.parameters == plain.parameters == plain.model.num_parameters()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("helps", [False, True])
def test_a_model_that_packing_breaks_is_run_plain(helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(model: Any, layers: list[AttentionLayer], *options: Any, **more: Any) -> Verdict:
        if packed_in(model) or not helps:
            raise UnsupportedModel("it is not right")
        return probe(model, layers, *options, **more)

    monkeypatch.setattr(loader, "probe", strict)
    path = save_model("llama", tmp_path)
    if helps:
        assert not packed_in(load_quietly(path).model)
    else:
        with pytest.raises(LoadFailed, match="it is not right"):
            load_quietly(path)


def test_a_model_with_nothing_to_unpack_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Any] = []

    def strict(model: Any, *options: Any, **more: Any) -> Verdict:
        probed.append(model)
        raise UnsupportedModel("it is not right")

    monkeypatch.setattr(loader, "probe", strict)
    with pytest.raises(LoadFailed, match="it is not right"):
        load_quietly(save_model("llama", tmp_path))
    assert len(probed) == 1


@pytest.mark.parametrize(("ratios", "pays"), [([2.0, 2.0, 0.9], True), ([2.0, 2.0, 2.0, 0.9], False)])
def test_a_measurement_that_something_disturbed_is_repeated(
    ratios: list[float], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(ratios)
    monkeypatch.setattr("scheduler.accel.cpu.packing._ratio", lambda plain, packed, x, evicting: next(left))
    answers: dict[str, bool] = {}
    assert Packing(answers).pays("a", [], [], torch.ones(1, 2, 3), 1.0, 0) is pays
    assert list(answers.values()) == [pays]
    assert Packing(answers).pays("a", [], [], torch.ones(1, 2, 3), 1.0, 0) is pays  # not measured again

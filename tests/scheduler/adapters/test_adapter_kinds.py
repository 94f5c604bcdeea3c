"""What adapters have beside low-rank products: magnitudes, biases, whole modules, and a place where they begin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import ATTENTION, Parts, make_parts, merged, save_adapter
from engine_kit import Kit
from safetensors.torch import load_file, save_file
from tiny_models import greedy, make_model

from cache.tier import Tier
from scheduler.adapters.adapter_checkpoint import BadAdapter
from scheduler.protocol import Export, Exported, Import, Imported, pack_ids

NAME = "gpt_oss"  # it has biases
PROMPT = [65 + i % 23 for i in range(11)]
SCALE = 2.0
PREFIX = "base_model.model."
CALL = [70, 81, 66]  # which activates a LoRA
Tensors = dict[str, torch.Tensor]
Change = Callable[[Any, Parts, torch.Generator], Tensors]  # changes an oracle; returns what peft saves of that


@cache
def plain() -> Any:
    """The model as it was saved."""
    return make_model(NAME)


@pytest.fixture
def kit() -> Iterator[Kit]:
    made = Kit(NAME)
    yield made
    made.adapters.remove()


@torch.no_grad()
def with_magnitudes(model: Any, parts: Parts, generator: torch.Generator) -> Tensors:
    """DoRA: the rows of the changed weights have other lengths."""
    found = {}
    for name in parts:
        weight = model.get_submodule(name).weight
        magnitude = 0.5 + torch.rand(len(weight), generator=generator)
        weight *= (magnitude / weight.norm(dim=1))[:, None]
        found[f"{name}.lora_magnitude_vector"] = magnitude
    return found


@torch.no_grad()
def with_biases(model: Any, parts: Parts, generator: torch.Generator) -> Tensors:
    """Other biases of maps with a LoRA, and of one without."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.bias.copy_(torch.randn(module.bias.shape, generator=generator))
            found[f"{name}.base_layer.bias" if name in parts else f"{name}.bias"] = module.bias.clone()
    return found


@torch.no_grad()
def with_added_biases(model: Any, parts: Parts, generator: torch.Generator) -> Tensors:
    """Biases of the upper halves."""
    found = {}
    for name in parts:
        bias = model.get_submodule(name).bias
        added = torch.randn(bias.shape, generator=generator) / 4
        bias += SCALE * added
        found[f"{name}.lora_B.bias"] = added
    return found


@torch.no_grad()
def with_modules(model: Any, parts: Parts, generator: torch.Generator) -> Tensors:
    """Another embedding, another norm and another head; the head was tied to the embedding, or not."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), False)
    found = {}
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        weight = model.get_submodule(name).weight
        weight += torch.randn(weight.shape, generator=generator) * weight.abs().mean()
        found[f"{name}.weight"] = weight.clone()
    return found


def with_magnitudes_and_biases(model: Any, parts: Parts, generator: torch.Generator) -> Tensors:
    return with_magnitudes(model, parts, generator) | with_biases(model, parts, generator)


KINDS: dict[str, tuple[Change, dict[str, Any]]] = {
    "DoRA": (with_magnitudes, {"use_dora": True}),
    "biases": (with_biases, {"bias": "all"}),
    "biases of halves": (with_added_biases, {"lora_bias": True}),
    "modules": (with_modules, {"modules_to_save": ["embed_tokens", "norm", "lm_head"]}),
    "DoRA and biases": (with_magnitudes_and_biases, {"use_dora": True, "bias": "all"}),
}


def save(folder: Path, parts: Parts, more: Tensors, **settings: Any) -> Path:
    """An adapter with more tensors than its halves."""
    save_adapter(folder, parts, 4, 4 * SCALE, **settings)
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {PREFIX + name: tensor.contiguous() for name, tensor in more.items()}, path)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_says_what_a_merged_model_says(kit: Kit, kind: str, tmp_path: Path) -> None:
    """Beside turns of the model alone and of another adapter, in the same steps; and nothing stays behind."""
    change, settings = KINDS[kind]
    parts, others = make_parts(plain(), ATTENTION, 4, 1), make_parts(plain(), ATTENTION, 4, 2)
    model = merged(plain(), parts, SCALE)
    more = change(model, parts, torch.Generator().manual_seed(3))
    without = merged(plain(), parts, SCALE)
    oracles = {"x": model, "y": merged(plain(), others, SCALE), "": plain()}
    with kit._installed():  # adapters are loaded when programs are there, as in a server
        adapter = kit.adapters.load("x", save(tmp_path / "x", parts, more, **settings))
        plainer = kit.adapters.load("y", save_adapter(tmp_path / "y", others, 4, 4 * SCALE))
        again = kit.adapters.load("z", save_adapter(tmp_path / "z", parts, 4, 4 * SCALE))
        turns = {name: kit.send([*PROMPT, 66], 5, adapter=name, logprobs=0) for name in oracles}
        while not kit.engine.idle:
            kit._step()
        kit.adapters.remove()
    for name, turn in turns.items():
        said = kit.outcomes[turn].tokens
        assert said == greedy(oracles[name], [*PROMPT, 66], 5, said)
        rows = oracles[name](input_ids=torch.tensor([[*PROMPT, 66, *said[:-1]]])).logits[0, len(PROMPT) :]
        given = [one.logprob for delta in kit.outcomes[turn].deltas for one in delta.logprobs]
        want = rows.log_softmax(-1)[range(len(said)), said]
        assert given == pytest.approx(want.tolist(), abs=1e-4)
    ids = torch.tensor([[*PROMPT, 66]])
    assert not torch.allclose(model(input_ids=ids).logits, without(input_ids=ids).logits, atol=1e-2)
    assert len({one.digest for one in (adapter, plainer, again)}) == 3
    assert (adapter.only_adds, plainer.only_adds) == (False, True)


def test_a_prompt_of_another_adapter_alone_where_one_has_modules(tmp_path: Path) -> None:
    """The model's norm gets all rows of a step, not only those whose logits are wanted: adapters are found by row."""
    kit, model = Kit("llama"), make_model("llama")
    parts, others = make_parts(model, ATTENTION, 4, 1), make_parts(model, ATTENTION, 4, 2)
    more = with_modules(merged(model, parts, SCALE), parts, torch.Generator().manual_seed(3))
    with kit._installed():
        kit.adapters.load("x", save(tmp_path / "x", parts, more, **KINDS["modules"][1]))
        kit.adapters.load("y", save_adapter(tmp_path / "y", others, 4, 4 * SCALE))
        turn = kit.send([*PROMPT, 66], 5, adapter="y")
        while not kit.engine.idle:
            kit._step()
        kit.adapters.remove()
    said = kit.outcomes[turn].tokens
    assert said == greedy(merged(model, others, SCALE), [*PROMPT, 66], 5, said)


def activated(parts: Parts, begin: int) -> Any:
    """The model with a LoRA from a position on: the oracle."""
    model = copy.deepcopy(plain())
    for name, (down, up) in parts.items():

        def add(
            _: Any, given: Any, out: torch.Tensor, down: torch.Tensor = down, up: torch.Tensor = up
        ) -> torch.Tensor:
            out[:, begin:] += SCALE * (given[0][:, begin:] @ down.T @ up.T)
            return out

        model.get_submodule(name).register_forward_hook(add)
    return model


def test_an_activated_lora_goes_on_from_the_models_own_kv(tmp_path: Path) -> None:
    """The KV before the invocation is the model's, in memory and on disk; that behind it is the adapter's only."""
    parts = make_parts(plain(), (*ATTENTION, "k_proj", "o_proj"), 4, 1)
    folder = save_adapter(tmp_path / "x", parts, 4, 4 * SCALE, alora_invocation_tokens=CALL)
    kit = Kit(NAME, folder=tmp_path / "kv")
    kit.adapters.load("x", folder)
    said = [*PROMPT, *CALL, *kit.ask([*PROMPT, *CALL], 4, session="s").tokens]  # an earlier call counts no more

    def turn(prompt: list[int], model: Any, reused: int, **options: Any) -> list[int]:
        outcome = kit.ask(prompt, 5, **options)
        assert outcome.tokens == greedy(model, prompt, 5, outcome.tokens)
        assert outcome.receipt.cached == reused
        return [*prompt, *outcome.tokens]

    asked = [*said, 72, *CALL, 75]
    model = activated(parts, len(said) + 1)
    assert greedy(model, asked, 5) != greedy(plain(), asked, 5)
    answered = turn(asked, model, len(said) - 1, adapter="x", session="fork")
    turn([*answered, 77], model, len(answered) - 1, adapter="x", session="fork")
    turn([*answered, 77], plain(), len(said) + 1, session="alone")  # of the fork what the model computed
    turn([*answered, *CALL], activated(parts, len(answered)), len(answered), adapter="x", session="again")
    turn([*said, 76], activated(parts, len(PROMPT)), len(PROMPT), adapter="x", session="s")  # the earlier call
    turn([*PROMPT, 76], plain(), len(PROMPT), adapter="x", session="uncalled")
    kit.leave()
    kit.adapters.remove()
    kit = Kit(NAME, folder=tmp_path / "kv")
    kit.adapters.load("x", folder)
    back = kit.ask([*answered, 79], 3, adapter="x", session="fork")
    assert back.tokens == greedy(model, [*answered, 79], 3, back.tokens)
    assert back.receipt.loaded == {Tier.DISK: len(answered)}
    kit.leave()
    kit.adapters.remove()


@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("invocation", [[], CALL])
def test_a_session_of_an_adapter_moves_to_another_server(
    tmp_path: Path, invocation: list[int], is_on_disk: bool
) -> None:
    """All of its KV, also before the invocation; there it serves the adapter, and the model as far as it is its."""
    parts = make_parts(plain(), ATTENTION, 4, 1)
    settings = {"alora_invocation_tokens": invocation} if invocation else {}
    folder = save_adapter(tmp_path / "x", parts, 4, 4 * SCALE, **settings)
    asked, begin = [*PROMPT, *CALL, 75], len(PROMPT) if invocation else 0
    oracle = activated(parts, begin)

    def kit_at(place: str) -> Kit:
        kit = Kit(NAME, folder=tmp_path / place)
        kit.adapters.load("x", folder)
        return kit

    kit = kit_at("here")
    said = [*asked, *kit.ask(asked, 5, adapter="x", session="s").tokens]
    if is_on_disk:
        kit.leave()
        kit.adapters.remove()
        kit = kit_at("here")
    kit.commands.export(Export("r", "a", "s", str(tmp_path / "capsule"), pack_ids(said)))
    assert [told.tokens for told in kit.answers() if isinstance(told, Exported)] == [len(said) - 1]
    kit.adapters.remove()
    kit = kit_at("there")
    kit.commands.take_in(Import("q", "b", "moved", str(tmp_path / "capsule")))
    assert kit.answers() == [Imported("q", len(said) - 1)]
    for adapter, model, reused in (("x", oracle, len(said) - 1), ("", plain(), begin)):
        outcome = kit.ask([*said, 77], 4, tenant="b", session="moved", adapter=adapter)
        assert outcome.tokens == greedy(model, [*said, 77], 4, outcome.tokens)
        assert outcome.receipt.cached == reused
    kit.leave()
    kit.adapters.remove()


def test_an_invocation_of_which_the_reply_has_the_end(kit: Kit, tmp_path: Path) -> None:
    """A prompt that ends with the call, so that marked tokens are drawn; and drafts of a turn without an adapter."""
    parts = make_parts(plain(), ATTENTION, 4, 1)
    kit.adapters.load("x", save_adapter(tmp_path / "x", parts, 4, 4 * SCALE, alora_invocation_tokens=CALL[:1]))
    prompt = [*PROMPT, CALL[0]]
    begin = max(at for at, token in enumerate(prompt) if token == CALL[0])
    for _ in range(2):
        said = kit.ask(prompt, 6, adapter="x", session="s").tokens
        assert said == greedy(activated(parts, begin), prompt, 6, said)


def test_what_does_not_fit_the_model_is_refused(kit: Kit, tmp_path: Path) -> None:
    parts = make_parts(plain(), ATTENTION, 4, 1)
    name = next(iter(parts))
    wrong: dict[str, tuple[Tensors, dict[str, Any]]] = {
        "magnitudes": ({f"{name}.lora_magnitude_vector": torch.ones(3)}, {"use_dora": True}),
        "no such bias": ({"model.layers.0.self_attn.o_proj.bias": torch.ones(4)}, {"bias": "all"}),
        "bias of the LoRA": ({f"{name}.lora_B.bias": torch.ones(3)}, {"lora_bias": True}),
        "another model": ({"lm_head.weight": torch.ones(3, 3)}, {"modules_to_save": ["lm_head"]}),
        "it has parts": ({"model.layers.0.mlp.weight": torch.ones(3)}, {"modules_to_save": ["mlp"]}),
        "no list of names": ({}, {"modules_to_save": [1]}),
    }
    for number, (why, (more, settings)) in enumerate(wrong.items()):
        folder = save(
            tmp_path / str(number), parts, more | ({"x.y": torch.ones(1)} if "names" in why else {}), **settings
        )
        with pytest.raises(BadAdapter, match=why):
            kit.adapters.load("x", folder)

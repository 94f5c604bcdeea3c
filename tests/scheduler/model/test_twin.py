"""What happens past the thresholds of a model is found out on a copy in which they are small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_kit import failing, probed
from tiny_models import ARCHITECTURES, RECURRENT, make_model, make_tokenizer, of_unit_gain
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from cache.pages.layers import read_layers
from scheduler.forward.rope import LongRope
from scheduler.model.loader import prepare
from scheduler.model.measurement import Measurement, make_session, random_tokens, reference_logits
from scheduler.model.probe import UnsupportedModel
from scheduler.model.thresholds import Thresholds
from scheduler.model.twin import Twin, _build, make_twin
from scheduler.model.verdict import Verdict

REAL = 4096  # far past the probe's timelines
SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8 * REAL,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class LateMLP(LlamaMLP):  # type: ignore[misc]  # transformers is untyped
    """Gives more past a position, which it counts from that of the first row."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.late_from = config.late_from
        self.first = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.first + torch.arange(x.shape[1])
        gain = torch.where(positions >= self.late_from, 2.0, 1.0)
        out: torch.Tensor = super().forward(x) * gain[None, :, None]
        return out


class LateLayer(LlamaDecoderLayer):  # type: ignore[misc]
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = LateMLP(config)

    def forward(self, hidden_states: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        self.mlp.first = int(position_ids[0, 0])
        return super().forward(hidden_states, position_ids=position_ids, **kwargs)


class LateAttention(LlamaAttention):  # type: ignore[misc]
    """Reads more sharply in timelines that have come to a length, which it learns from the cache."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        past = past_key_values.get_seq_length(self.layer_idx) if past_key_values is not None else 0
        late = torch.arange(hidden_states.shape[1]) + past >= self.config.late_from
        hidden_states = hidden_states * torch.where(late, 3.0, 1.0)[None, :, None]
        return super().forward(hidden_states, *args, past_key_values=past_key_values, **kwargs)


class LouderAttention(LlamaAttention):  # type: ignore[misc]
    """Says more with every so many positions, which it counts from that of the first row."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(hidden_states, *args, **kwargs)
        first = kwargs["position_ids"][:, :1]
        places = (first + torch.arange(hidden_states.shape[1])[None]) // self.config.late_from
        return out * (1.0 + places)[..., None], weights


def planted(kind: type, late_from: int = REAL) -> Any:
    """A tiny Llama whose layers or attention are of that kind; ``late_from`` is in its config."""

    class Planted(LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for at, layer in enumerate(self.model.layers):
                if issubclass(kind, LlamaDecoderLayer):
                    self.model.layers[at] = kind(config, at)
                else:
                    layer.self_attn = kind(config, at)

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE)
    config.late_from = late_from
    return of_unit_gain(Planted(config).eval())


def verdict_on(model: Any) -> Verdict:
    return probed(model, context=SHAPE["max_position_embeddings"])


@pytest.fixture
def nearsighted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that looks at its short timelines only."""

    monkeypatch.setattr("scheduler.model.thresholds.make_twin", lambda *_: Twin())


@pytest.mark.usefixtures("nearsighted")
@pytest.mark.parametrize("kind", [LateLayer, LouderAttention])
def test_short_timelines_do_not_show_it(kind: type) -> None:
    assert verdict_on(planted(kind)).mode.name == "packed"


@pytest.mark.parametrize("kind", [LateLayer, LouderAttention])
def test_a_planted_threshold_is_found(kind: type) -> None:
    verdict = verdict_on(planted(kind))
    assert verdict.mode.name == "alone"
    assert verdict.crossed == (f"late_from {REAL}",)
    assert f"past late_from {REAL}" in verdict.report


def test_attention_that_adds_its_place_to_the_length_is_right_in_packed_steps() -> None:
    verdict = verdict_on(planted(LateAttention))
    assert verdict.mode.name == "packed"
    assert verdict.crossed == (f"late_from {REAL}",)
    assert not verdict.unproven


def test_a_context_that_ends_before_it_needs_no_other_mode() -> None:
    verdict = probed(planted(LateLayer), context=REAL)
    assert (verdict.mode.name, verdict.crossed) == ("packed", ())


def test_where_nothing_is_late_nothing_is_measured() -> None:
    assert verdict_on(make_model("llama")).crossed == ()


# -- the copy ---------------------------------------------------------------------------------------------------------


def twin(model: Any, context: int = 0) -> Twin:
    ids = random_tokens(model, (42,))[0]

    def says(one: Any, count: int | None) -> torch.Tensor:
        return reference_logits(one, make_session(ids[:count], None))

    return make_twin(model, says, context or model.config.max_position_embeddings)


def test_a_copy_shares_the_weights_and_leaves_the_model_as_it_was() -> None:
    model = planted(LateLayer)
    before = {name: (weight.data_ptr(), weight._version) for name, weight in model.named_parameters()}
    found = twin(model)
    assert found.thresholds == {"late_from": (REAL, 8)}
    assert found.model.config.late_from == found.model.model.layers[1].mlp.late_from == 8
    assert {name: (w.data_ptr(), w._version) for name, w in found.model.named_parameters()} == before
    assert model.config.late_from == model.model.layers[1].mlp.late_from == REAL
    assert torch.get_default_dtype() is torch.float32


def test_sizes_of_weights_and_numbers_without_effect_are_no_thresholds() -> None:
    model = make_model("llama")
    model.config.nothing = 300
    assert twin(model) == Twin()
    assert twin(planted(LateLayer), context=REAL) == Twin()


def test_the_size_of_a_vocabulary_without_padding_is_no_threshold() -> None:
    class Cut(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits[..., : self.config.words]
            return out

    config = LlamaConfig(**SHAPE)
    config.words = 250
    assert twin(Cut(config).eval()) == Twin()


def test_what_changes_the_first_tokens_is_no_threshold() -> None:
    """Factors of scores and bases of positions are integers too: small ones would make results sensitive."""
    config = Gemma3TextConfig(
        **{**SHAPE, "num_key_value_heads": 1}, head_dim=256, query_pre_attn_scalar=256, sliding_window=REAL
    )
    config.rope_parameters["sliding_attention"]["rope_theta"] = 10_000
    model = Gemma3ForCausalLM(config).eval()
    assert twin(model).thresholds == {"sliding_window": (REAL, 8)}


@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT, "longrope"])
def test_a_copy_without_changes_says_the_same(name: str) -> None:
    """Else a difference would be the copy's, not the threshold's."""
    model = make_model(name)
    session = make_session(random_tokens(model, (42,))[0], None)
    assert torch.equal(reference_logits(_build(model, {}), session), reference_logits(model, session))


def test_a_window_that_only_the_cache_has_is_found() -> None:
    """The mask of this one has no window, but its cache cuts one: from scratch nothing depends on it."""

    class Cutting(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            if past_key_values is None and kwargs.get("use_cache"):
                layers = [DynamicSlidingWindowLayer(sliding_window=self.config.cut_at) for _ in range(2)]
                past_key_values = Cache(layers=layers)
            return super().forward(*args, past_key_values=past_key_values, **kwargs)

    config = LlamaConfig(**SHAPE)
    config.cut_at = REAL
    verdict = verdict_on(Cutting(config).eval())
    assert verdict.crossed == (f"cut_at {REAL}",)


def test_what_cannot_be_measured_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(
        "scheduler.model.thresholds.make_twin", lambda *_: Twin(obstacle="no forward with a small window")
    )
    with caplog.at_level("WARNING", "warmturn.engine"):
        loaded = prepare(make_model("llama"), make_tokenizer())
    loaded.verdict.mode.remove()
    assert loaded.verdict.unproven == "no forward with a small window"
    assert "no forward with a small window" in caplog.text


def test_a_copy_whose_code_fails_in_every_mode_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thresholds, "_error", failing(IndexError("a number that nobody chose")))
    verdict = verdict_on(planted(LateLayer))
    assert verdict.mode.name == "packed"
    assert "a number that nobody chose" in verdict.unproven


def louder_by(more: Callable[[torch.Tensor], torch.Tensor]) -> type:
    """A layer that gives so much more of what it is given, past its threshold."""

    class Louder(LateMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            late = x.shape[1] >= self.late_from
            out: torch.Tensor = super().forward(x) * (1.0 + late * more(x))
            return out

    class LouderLayer(LateLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.mlp = Louder(config)

    return LouderLayer


def test_a_model_that_is_not_causal_past_its_threshold_is_computed_anew() -> None:
    verdict = verdict_on(planted(louder_by(torch.Tensor.mean)))
    assert verdict.mode.name == "recomputed"
    assert "depends on later tokens" in verdict.report


def test_experts_that_rounding_chooses_do_not_make_a_model_depend_on_later_tokens() -> None:
    def round_otherwise(_: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        noise = torch.randn(args[0].shape, generator=torch.manual_seed(len(args[0])))
        return ((args[0] * (1 + 0.03 * noise)).to(args[0].dtype),)

    model = make_model("gpt_oss").to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.router.register_forward_pre_hook(round_otherwise)
    layers = read_layers(model.config)
    assert Measurement(model, layers, 16, LongRope(model)).is_causal()


def test_large_logits_of_16_bits_are_causal() -> None:
    """Numbers from 64 on are half a unit apart in bfloat16, which is more than any fixed allowance."""
    config = Gemma3TextConfig(
        **{**SHAPE, "num_key_value_heads": 1}, head_dim=16, query_pre_attn_scalar=16, sliding_window=REAL
    )
    model = of_unit_gain(Gemma3ForCausalLM(config).to(torch.bfloat16).eval())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 64, False)
    verdict = verdict_on(model)
    assert (verdict.mode.name, verdict.crossed) == ("packed", (f"sliding_window {REAL}",))


def test_a_model_that_does_not_repeat_itself_past_its_threshold_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="not deterministic"):
        verdict_on(planted(louder_by(lambda x: torch.rand(()))))

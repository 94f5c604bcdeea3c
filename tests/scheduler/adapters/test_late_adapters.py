"""Adapters that change nothing before all KV of a token is made: they share KV with the model, and others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_kit import check_turn, make_parts, merged, save_adapter
from engine_kit import Kit
from tiny_models import greedy, make_model

from scheduler.turn_receipt import Miss

PROMPT = [65 + i % 23 for i in range(21)]


@pytest.mark.parametrize(
    ("name", "last", "shares"),
    [
        ("llama", ("layers.1.mlp", "lm_head"), True),
        ("gemma3", ("layers.2.mlp",), True),
        ("qwen3_next", ("layers.2.mlp.shared_expert", "lm_head"), True),
        ("jamba", ("lm_head",), True),
        ("llama", ("layers.1.self_attn.o_proj",), False),  # of a module that stores KV: nobody looks into it
        ("llama", ("layers.0.mlp.down_proj", "lm_head"), False),
        ("qwen3_next", ("layers.1.mlp.shared_expert",), False),
    ],
)
def test_kv_is_shared_where_it_is_the_same(name: str, last: tuple[str, ...], shares: bool, tmp_path: Path) -> None:
    plain = make_model(name)
    names = ("o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    parts = {each: part for each, part in make_parts(plain, names, 4, 1).items() if any(one in each for one in last)}
    model = merged(plain, parts, 2.0)
    kit = Kit(name)
    kit.adapters.load("x", save_adapter(tmp_path / "x", parts, 4, 8.0))

    def turn(prompt: list[int], adapter: str, reused: int, miss: Miss | None = None) -> list[int]:
        return check_turn(kit, model if adapter else plain, prompt, 6, reused, miss, adapter=adapter, session="s")

    try:
        said = turn(PROMPT, "", 0)
        said = turn([*said, 66], "", len(said) - 1)
        for adapter in ("x", ""):
            said = turn([*said, 67], adapter, *((len(said) - 1,) if shares else (0, Miss.ADAPTER)))
        assert any(greedy(model, said[:length], 6) != greedy(plain, said[:length], 6) for length in (7, 12, len(said)))
    finally:
        kit.adapters.remove()

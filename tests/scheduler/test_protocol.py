"""What crosses the socket comes out as it went in."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from cache.tier import Tier, TierStats
from scheduler.engine_config import EngineConfig
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.protocol import (
    Cancel,
    Delta,
    FinishReason,
    Forget,
    FromEngine,
    Loading,
    ModelFailed,
    Ready,
    Refused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    TokenizerRead,
    TokenLogprob,
    pack_ids,
    unpack_ids,
)
from scheduler.sampling_params import Sampling, Stopping
from scheduler.tokenizer_parts import AddedToken, TokenizerParts
from scheduler.turn_receipt import Receipt

FACTS = ModelFacts("M", 1, 4, "float32", "cpu", 9, 8, (1, 2), "packed", "ok", {"full": 2}, 64, 16, 10, "abc")
TO_ENGINE = [
    Submit(
        "t",
        "a",
        pack_ids([1, 2]),
        "s",
        Sampling(temperature=0.5, seed=2**40, logit_bias={3: -1.0}),
        Stopping(max_tokens=5, min_tokens=1, stop=("x",), stop_token_ids=(7,)),
        2,
        0,
    ),
    Submit("t", "a", b""),
    Cancel("t"),
    Forget("a", "s"),
    Shutdown(),
]
FROM_ENGINE = [
    StepOutputs(
        (
            Delta("t", receipt=Receipt(5, 4, {Tier.HOST: 1, Tier.DISK: 2})),
            Delta("t", (65,), "A", logprobs=(TokenLogprob(65, "A", b"A", -0.5, ((65, "A", b"\xff", -0.5),)),)),
            Delta("t", finish_reason=FinishReason.STOP, stop=7, prompt_logprobs=(TokenLogprob(1, "", b"", None),)),
            Delta("t", finish_reason=FinishReason.STOP, stop="7"),
        ),
        Stats(running=1, steps=2**40, tiers={Tier.REMOTE: TierStats(1, 2, 3)}),
    ),
    Refused("t", "queue_full", "full"),
    Loading("reading"),
    TokenizerRead(None),
    TokenizerRead(TokenizerParts("{}", {"default": "x"}, {}, (1,), (AddedToken(1, "<s>", True),), {"a": [1]})),
    Ready(FACTS),
    ModelFailed("no"),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_to_the_engine(message: ToEngine) -> None:
    decoder: Any = msgspec.msgpack.Decoder(ToEngine)
    assert decoder.decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_from_the_engine(message: FromEngine) -> None:
    decoder: Any = msgspec.msgpack.Decoder(FromEngine)
    assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_the_configuration_is_one_line_of_json() -> None:
    config = EngineConfig("ipc:///x", "a model\nof two lines", kv_memory=2**40)
    line = msgspec.json.encode(config)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=EngineConfig) == config


def test_ids_are_four_bytes_each() -> None:
    ids = [0, 1, 255, 256, 2**31 - 1, -1]
    data = pack_ids(ids)
    assert len(data) == 4 * len(ids)
    assert list(unpack_ids(data)) == ids
    assert list(unpack_ids(b"")) == []
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError, match="bytes"):
        unpack_ids(b"abc")


def test_the_server_s_side_needs_no_torch() -> None:
    code = "import sys, scheduler.protocol; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""What crosses the socket between the server process and the engine process.

Frozen structs, encoded as msgpack by msgspec; no tensors, no pickle. The server sends one message per
request; the engine answers with one ``StepOutputs`` per step. This module is the only part of
``scheduler`` that ``server`` imports, and it imports nothing of ours and no torch.
"""

from __future__ import annotations

from array import array
from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a turn ended. Every submitted turn ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the client left, or the session was deleted
    ERROR = "error"  # an exception inside this turn, or the engine died


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn from the logits. Defaults are OpenAI's.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. Presence and frequency
    penalties count generated tokens, the repetition penalty also those of the prompt.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}


class Stopping(msgspec.Struct, frozen=True):
    """When a turn ends. ``max_tokens`` None means: until the context is full."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Submit(msgspec.Struct, frozen=True, tag=True):
    """One turn to run.

    ``prompt`` holds the whole timeline as int32 ids (see ``pack_ids``): the engine itself slices off what the
    session's cache already stores. ``session`` is the client's name for the session within ``tenant``,
    or None for an anonymous one. ``logprobs`` asks for the log-probability of each generated token
    and of that many alternatives (None: none at all); ``prompt_logprobs`` the same for prompt tokens.
    """

    turn: str
    tenant: str
    prompt: bytes
    session: str | None = None
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client left: take the turn out of the batch; its KV stays."""

    turn: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop a session and its KV; a running turn of it is cancelled."""

    tenant: str
    session: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End every turn as cancelled and exit with status 0."""


ToEngine = Submit | Cancel | Forget | Shutdown


class ModelFacts(msgspec.Struct, frozen=True):
    """What the engine measured or read while loading; served by ``/v1/models/{id}``.

    ``vocab_size`` is the width of the logits, ``max_context`` the longest timeline in tokens that this server
    accepts, ``mode`` the probe's verdict (design section 5), ``kv_bytes_per_token`` over all layers.
    With an ``encoder_decoder`` prompt and reply have a context each.
    """

    architecture: str
    parameters: int
    dtype: str
    device: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    mode: str
    probe: str
    layer_kinds: dict[str, int]
    kv_bytes_per_token: int
    page_size: int
    pages: int
    fingerprint: str
    encoder_decoder: bool = False


class Receipt(msgspec.Struct, frozen=True):
    """What a turn's prompt cost: ``cached`` tokens were reused, ``restored`` of them from the host tier."""

    prompt: int
    cached: int
    restored: int = 0


TopLogprob = tuple[int, str, bytes, float]  # id, text, the token's own bytes, log-probability


class TokenLogprob(msgspec.Struct, frozen=True):
    """``data`` are the token's own bytes; ``top`` is most likely first."""

    token_id: int
    text: str
    data: bytes
    logprob: float | None  # None for the first token of a prompt: nothing precedes it
    top: tuple[TopLogprob, ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """News of one turn after one step.

    The first delta of a turn carries its ``receipt`` and may hold no token: the turn has been admitted. The last one
    carries ``finish_reason``. ``text`` is what may be shown; it can lag behind ``tokens`` while a stop string or
    a multi-byte character may still be forming. ``tokens`` includes the token that ended the turn.
    ``stop`` tells which stop string or stop token id ended it. ``reused`` tokens of history are in ``receipt``.
    """

    turn: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    receipt: Receipt | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A turn that was not admitted. ``code``: queue_full, session_busy, context_length_exceeded or invalid_prompt."""

    turn: str
    code: str
    message: str


class Stats(msgspec.Struct, frozen=True):
    """Gauges (now) and counters (since the engine started) for ``/metrics``."""

    running: int = 0
    waiting: int = 0
    sessions: int = 0
    pages_device: int = 0
    pages_device_total: int = 0
    pages_host: int = 0
    pages_host_total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    evictions: int = 0


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Everything one step has to tell; an idle engine sends an empty one every second, as its heartbeat."""

    deltas: tuple[Delta, ...]
    stats: Stats


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress while the engine loads: ``stage`` is a few words for people."""

    stage: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and probed; turns may be submitted."""

    facts: ModelFacts


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served; ``message`` is one line for people. The engine exits with status 2 after it."""

    message: str


FromEngine = StepOutputs | Refused | Loading | Ready | Failed


class EngineConfig(msgspec.Struct, frozen=True):
    """What the engine process is started with (JSON, on its standard input)."""

    address: str  # zmq endpoint that the server has bound
    model: str  # hub id or folder
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    max_context: int | None = None  # tokens; None: what the model allows
    kv_memory: int | None = None  # bytes of the device tier; None: measured
    host_memory: int | None = None  # bytes of the host tier; None: 0 on CPU, a quarter of RAM with CUDA
    max_running: int = 256
    max_step_tokens: int | None = None  # None: 512 on CPU, 2048 on CUDA
    max_queued: int = 1024
    verdicts: str | None = None  # folder that remembers which mode fits which model


def pack_ids(ids: list[int]) -> bytes:
    """Token ids -> int32 bytes, the form in which they cross the socket."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """The reverse of ``pack_ids``."""
    ids: array[int] = array("i")
    ids.frombytes(data)
    return ids

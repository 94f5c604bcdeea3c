"""The messages between the server process and the engine process.

They are frozen msgspec structs, encoded as msgpack, without tensors or pickle. The server sends one message per
request; the engine sends one ``StepOutputs`` per step. The server process imports this module too, so it imports no
torch, and nothing of this project but other modules that both processes import.
"""

from __future__ import annotations

from array import array
from enum import StrEnum

import msgspec

from cache.tier import Tier, TierHolding
from scheduler.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.pooling_messages import Pool, Pooled
from scheduler.sampling_params import Sampling, Stopping, ThinkingBudget
from scheduler.speech_messages import Transcribe, Transcribed
from scheduler.tokenizer_parts import TokenizerParts
from scheduler.turn_receipt import Receipt


class FinishReason(StrEnum):
    """Why a turn ended. Every submitted turn ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # stopped on purpose; or the client left, or the session was deleted
    ERROR = "error"  # an exception inside this turn, or the engine died


class DraftSource(StrEnum):
    """Where drafted tokens come from."""

    GRAMMAR = "grammar"  # what the reply's grammar leaves no choice about
    PREDICTION = "prediction"  # the reply that the client predicts
    HISTORY = "history"  # the session's own timeline
    SESSIONS = "sessions"  # other sessions of the tenant
    MODEL = "model"  # the draft model
    HEADS = "heads"  # the model's own layers for multi-token prediction


class Submit(msgspec.Struct, frozen=True, tag=True):
    """One turn to run.

    ``prompt`` holds the whole timeline as int32 ids (see ``pack_ids``): the engine itself slices off what the
    session's cache already stores. ``session`` is the client's name for the session within ``tenant``,
    or None for an anonymous one. ``logprobs`` asks for the log-probability of each generated token
    and of that many alternatives (None: none at all); ``prompt_logprobs`` the same for prompt tokens.
    ``grammar`` (of llguidance, as one string) is what the reply must match: where it is complete the turn ends.
    With ``special`` the text shows special tokens too, but never the one that ended the turn.
    An anonymous turn with a ``salt`` reuses, and leaves behind, KV for turns of the same tenant and salt only.
    ``keep_until`` pins the KV of whatever session it runs on, as ``Pin`` does, and never shortens a pin.
    ``side``: the client will hardly go on from this turn: what it leaves is the first to be evicted.
    ``thinking`` limits how long the reply reasons (None: no limit).
    ``parent``: the session of the same tenant that waits for this turn (of a sub-agent), or that this one is a side
    call of: it is not evicted for this turn, and its age counts anew with it.
    ``media``: the digests of the pictures whose media ids the prompt has, all of which have been expanded.
    ``spare``: nobody waits for it: it runs in what steps leave over, and gives its place to any other.
    With ``speculate`` tokens may be drafted for it, which changes no token of the reply. ``prediction`` (int32, see
    ``pack_ids``) is what the client expects the reply to be. ``adapter``: the name of the adapter with which the model
    computes it; "": none. ``state``: the last delta of this turn, which generates nothing, has what the model's output
    head reads behind the prompt's last token.
    """

    turn: str
    tenant: str
    prompt: bytes
    session: str | None = None
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    special: bool = False
    salt: str = ""
    keep_until: float = 0.0
    side: bool = False
    thinking: ThinkingBudget | None = None
    parent: str | None = None
    speculate: bool = True
    prediction: bytes = b""
    media: tuple[str, ...] = ()
    spare: bool = False
    adapter: str = ""
    state: bool = False


class AwaitTools(msgspec.Struct, frozen=True, tag=True):
    """The turn of that id has ended with calls of these tools: what it leaves is kept as long as they usually take."""

    turn: str
    tools: tuple[str, ...]


class Warm(msgspec.Struct, frozen=True, tag=True):
    """A request is announced: bring the KV of a named session, or of the longest cached prefix of ``prompt`` (int32,
    see ``pack_ids``), to the device if there is room beside what is worth more. ``until``: as ``Submit.keep_until``.
    Nothing is answered, and nothing is computed.
    """

    tenant: str
    session: str | None = None
    prompt: bytes = b""
    salt: str = ""
    until: float = 0.0


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a turn: take it out of the batch; its KV stays cached. Or the ``Pool`` of that request."""

    turn: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop a session and its KV from every tier; a running turn of it is cancelled. Answered by ``Forgotten``, with the
    ``life`` that the server has given: names are used again."""

    tenant: str
    session: str
    life: int | None = None


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Evict this session's KV last until a time (Unix seconds; 0: no longer). A pin never prevents eviction."""

    tenant: str
    session: str
    until: float


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Ask where the KV of a session lies. Answered by ``Inspected``."""

    request: str
    tenant: str
    session: str


class Export(msgspec.Struct, frozen=True, tag=True):
    """Ask for the KV of a session as files ``000000.kv``, ``000001.kv``... in a new ``folder``. Answered by
    ``Exported``. ``token_ids`` (int32, see ``pack_ids``) is the session's timeline: the files hold nothing that is not
    of it, no token that was rewound and none of a session that it shares KV with. None: all that is cached of it.
    """

    request: str
    tenant: str
    session: str
    folder: str
    token_ids: bytes | None = None


class Import(msgspec.Struct, frozen=True, tag=True):
    """Take the files of an ``Export`` as the KV of a session, checked like any other file. Answered by ``Imported``."""

    request: str
    tenant: str
    session: str
    folder: str


class MediaItem(msgspec.Struct, frozen=True):
    """A picture: the SHA-256 of its bytes, hexadecimal, and the bytes, without which the engine may not know it.
    ``kind``: image, audio or video; empty: the first that the model takes.
    """

    digest: str
    data: bytes = b""
    kind: str = ""


class Expand(msgspec.Struct, frozen=True, tag=True):
    """Ask by what pictures are replaced in a prompt. Answered by ``Expanded``."""

    request: str
    tenant: str
    media: tuple[MediaItem, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End every turn as cancelled, write what is not on disk yet for at most ``flush_seconds``, exit with status 0."""

    flush_seconds: float = 0.0


ToEngine = (
    Submit
    | AwaitTools
    | Warm
    | Cancel
    | Forget
    | Pin
    | Inspect
    | Export
    | Import
    | Expand
    | LoadAdapter
    | UnloadAdapter
    | Transcribe
    | Pool
    | Shutdown
)


TopLogprob = tuple[int, str, bytes, float]  # id, text, the token's own bytes, log-probability


class TokenLogprob(msgspec.Struct, frozen=True):
    """``data`` are the token's own bytes; ``top`` is most likely first."""

    token_id: int
    text: str
    data: bytes
    logprob: float | None  # None for the first token of a prompt: nothing precedes it
    top: tuple[TopLogprob, ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """What one step adds to a turn.

    The first delta of a turn carries its ``receipt`` and may hold no token: the turn has been admitted. The last one
    carries ``finish_reason``. ``text`` is what may be shown; it can lag behind ``tokens`` while a stop string or a
    multi-byte character may still be forming. ``tokens`` includes the token that ended the turn. ``stop`` tells which
    stop string or stop token id ended it. ``reused`` tokens of history are in ``receipt``. ``thinking_cut``: the turn's
    budget for reasoning was spent, and the end of the reasoning was forced, with this delta or an earlier one.
    With the last one: ``drafts``, tokens drafted for the turn and accepted ones, by ``DraftSource``; ``state``,
    float32, little-endian, if it was asked for; ``encoding``, seconds of the encoder passes that it waited for."""

    turn: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    receipt: Receipt | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    thinking_cut: bool = False
    drafts: dict[str, tuple[int, int]] = {}
    state: bytes = b""
    encoding: float = 0.0


QUEUE_FULL = "Too many requests are waiting; try again later."


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A turn that was not admitted. ``code``: queue_full, session_busy, context_length_exceeded, model_not_found,
    invalid_prompt or invalid_grammar; the last one is told while the turn waits, or when its grammar allows nothing
    behind what the reply says.
    """

    turn: str
    code: str
    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """The deltas of one step. An idle engine sends an empty one every second, as a heartbeat. ``at``: when it was over
    (monotonic seconds).
    """

    deltas: tuple[Delta, ...]
    stats: Stats
    at: float | None = None


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress while the engine loads: ``stage`` is a few words for people."""

    stage: str


class TokenizerRead(msgspec.Struct, frozen=True, tag=True):
    """The model's tokenizer, which the engine reads before the weights. None: the server has to read it itself."""

    parts: TokenizerParts | None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and probed; turns may be submitted."""

    facts: ModelFacts


class ModelFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served; ``message`` is one line for people. The engine exits with status 2 after it."""

    message: str


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Forget``: no tier holds anything of the session as it was then, and its files are unlinked."""

    tenant: str
    session: str
    life: int | None = None


class Inspected(msgspec.Struct, frozen=True, tag=True):
    """``tiers``: only those that hold something. ``running``: a turn of it runs."""

    request: str
    tiers: dict[Tier, TierHolding]
    running: bool = False


class Exported(msgspec.Struct, frozen=True, tag=True):
    """``files`` were made, which hold ``tokens`` of the session; 0 where no tier holds anything of it."""

    request: str
    files: int
    tokens: int


class Imported(msgspec.Struct, frozen=True, tag=True):
    """``tokens`` of the session are cached now; where these are not all of the file's, ``reason`` says why."""

    request: str
    tokens: int
    reason: str | None = None


class ExpandedMedium(msgspec.Struct, frozen=True):
    """A picture in a prompt: its ``text`` stands in place of the mark that the template has written, and its media
    ``ids`` (int32, see ``pack_ids``) in place of the placeholders that this text has as tokens. ``error``: why it
    cannot be used, a sentence for the client; then there is nothing else.
    """

    digest: str
    text: str
    ids: bytes
    error: str = ""


class Expanded(msgspec.Struct, frozen=True, tag=True):
    """``unknown``: the digests of those whose bytes are needed."""

    request: str
    media: tuple[ExpandedMedium, ...]
    unknown: tuple[str, ...] = ()


Answer = Inspected | Exported | Imported | Expanded | AdapterLoaded | Transcribed | Pooled

FromEngine = StepOutputs | Refused | Loading | TokenizerRead | Ready | ModelFailed | Forgotten | Answer


def pack_ids(ids: list[int]) -> bytes:
    """Token ids -> int32 bytes, the form in which they cross the socket."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """The reverse of ``pack_ids``."""
    ids: array[int] = array("i")
    ids.frombytes(data)
    return ids

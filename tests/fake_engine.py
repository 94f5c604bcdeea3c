"""An engine in the test's own process, behind the interface of ``server.engine.engine``: scripted, no model, no socket.

It answers every turn with ``reply`` (or with ``ids``), one token per delta, ends with the end-of-turn token, and
honours max_tokens, stop strings, logprobs and cancellation. Attributes are its script; set them before the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from msgspec import structs

from cache.media_ids import media_ids
from cache.tier import Tier, TierHolding
from scheduler.adapter_messages import AdapterLoaded
from scheduler.core.thinking import ThinkingState
from scheduler.engine_stats import Stats
from scheduler.model_facts import AdapterFacts, MediaMarks, ModelFacts, PoolingFacts
from scheduler.pooling_messages import Pooled, PoolInput
from scheduler.protocol import (
    Delta,
    Expanded,
    ExpandedMedium,
    Exported,
    FinishReason,
    Imported,
    Inspected,
    MediaItem,
    Submit,
    TokenLogprob,
    Warm,
    unpack_ids,
)
from scheduler.sampling_params import ThinkingBudget
from scheduler.speech_messages import SpeechFacts, SpokenPart, Transcribe, Transcribed
from scheduler.turn_receipt import Receipt
from server.chat.chat_tokenizer import ChatTokenizer
from server.engine.engine import EngineDied, EngineUnavailable, State, TurnRefused
from server.engine.mailbox import Mailbox

END = 2  # <|im_end|> of the demo model
FACTS = ModelFacts(
    architecture="FakeForCausalLM",
    parameters=1,
    weight_bytes=4,
    dtype="float32",
    device="cpu",
    vocab_size=1024,
    max_context=2048,
    eos_token_ids=(END,),
    mode="packed",
    probe="scripted",
    layer_kinds={"full": 2},
    kv_bytes_per_token=64,
    page_size=16,
    pages=128,
    fingerprint="f" * 32,
)


PICTURE_ROWS = 5
SEEING = structs.replace(FACTS, media=("image",), media_marks=MediaMarks("<image>", 0, "scripted", "f" * 32))

LISTENING = structs.replace(
    FACTS, mode="speech to text", task="transcribe", speech=SpeechFacts(16_000, 2.0, ("de", "en"), True, True, True, 8)
)


def spoken(window: Transcribe) -> Transcribed:
    """Two parts of a second each, or one of what there is, and what was asked for."""
    seconds = len(window.samples) / 32_000
    half = min(1.0, seconds / 2)
    parts = (
        SpokenPart(0.0, half, " Hello there.", (1, 2), -0.25, 0.125),
        SpokenPart(half, 2 * half, " Goodbye.", (3,), -0.25, 0.125),
    )
    return Transcribed(window.request, parts, 2 * half, window.language or "en")


EMBEDDING = structs.replace(
    FACTS, max_context=24, task="embed", pages=0, page_size=1, kv_bytes_per_token=0,
    pooling=PoolingFacts(8, ("mean",), True, True, {"query": "q: ", "document": ""}),
)  # fmt: skip
SCORING = structs.replace(EMBEDDING, task="score", pooling=PoolingFacts(1))


def vector_of(one: PoolInput, width: int) -> list[float]:
    """See ``FakeEngine.pool``."""
    if width == 1:
        return [sum(one.types) / max(1, len(one.types))]
    made = np.array(
        [sum(i * (n + 1) % (7 + place) for n, i in enumerate(unpack_ids(one.ids))) for place in range(width)]
    )
    vector: list[float] = (made / np.linalg.norm(made)).tolist()
    return vector


def expansion_of(digest: str) -> ExpandedMedium:
    """What stands for a picture: the demo model's token 0, some times."""
    return ExpandedMedium(digest, PICTURE_ROWS * "<|endoftext|>", media_ids(digest, PICTURE_ROWS).tobytes())


class FakeEngine:
    """See the module. ``submitted``, ``cancelled``, ``running``, ``forgotten`` and ``pinned`` tell what happened to it.

    ``kv`` is what the engine holds: the files of a session's export, one byte a token. ``import_`` puts them there,
    unless ``import_reason`` says why not; ``forget`` drops them and ends the session's turn.
    """

    def __init__(self, tokens: ChatTokenizer) -> None:
        self.facts: ModelFacts | None = FACTS
        self.stats = Stats()
        self.healthy = True
        self.draining = False
        self.reply = "Hello there, friend."
        self.drafts: dict[str, tuple[int, int]] = {}
        self.ids: list[int] | None = None
        self.refusal: TurnRefused | None = None
        self.refuse_from = 0  # the first turn that `refusal` is for
        self.full_for: set[str] = set()  # tenants that find the queue full
        self.read: list[str] = []  # tenants whose requests were read for a turn
        self.ends_badly: FinishReason | Exception | None = None  # after `badly_after` tokens
        self.badly_after = 2
        self.pause_after: int | None = None  # tokens; goes on when `go` is set
        self.admit = asyncio.Event()
        self.admit.set()
        self.go = asyncio.Event()
        self.submitted: list[Submit] = []
        self.cancelled: list[str] = []
        self.forgotten: list[tuple[str, str]] = []
        self.lives: list[int | None] = []  # of what was forgotten
        self.on_forgotten: Callable[[str, str, int], None] | None = None
        self.awaited: dict[str, tuple[str, ...]] = {}  # tools, by turn
        self.announced: list[Warm] = []
        self.pinned: dict[tuple[str, str], float] = {}
        self.kv: dict[tuple[str, str], list[bytes]] = {}
        self.import_reason: str | None = None
        self.pictures: dict[str, set[str]] = {}  # by tenant: the digests that it knows
        self.call_failure: Exception | None = None  # of inspect, export and import_
        self.exported: list[bytes] = []  # the timelines that were asked for
        self.heard: list[Transcribe] = []  # windows of sounds
        self.hears: Callable[[Transcribe], Transcribed] = spoken
        self.adapters: dict[str, str] = {}  # folders by name
        self.adapter_error = ""  # why it loads none
        self.spare = False  # the last one of these
        self.pooled: list[tuple[str, list[PoolInput]]] = []  # tenants and inputs of requests for vectors
        self.encoding = 0.0  # told with the last delta
        self.receipts: list[Receipt] = []  # of the next turns; later ones are made of what was seen before
        self.running: set[str] = set()
        self._tokens = tokens
        self._timelines: list[tuple[str, list[int]]] = []
        self._turns: dict[str, tuple[Submit, Mailbox]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def load_adapter(self, name: str, folder: str) -> AdapterLoaded:
        """Note it, unless it is to fail."""
        if self.adapter_error:
            return AdapterLoaded("r", error=self.adapter_error)
        self.adapters[name] = folder
        return AdapterLoaded("r", AdapterFacts(name, 8, 2, 64, "d" * 32))

    def unload_adapter(self, name: str) -> None:
        """Note it."""
        del self.adapters[name]

    async def pool(self, tenant: str, inputs: Sequence[PoolInput], spare: bool = False) -> Pooled:
        """Vectors of unit length that differ with the ids; for a model that scores, the share of the second text."""
        self.pooled.append((tenant, [*inputs]))
        self.spare = spare
        if self.call_failure is not None:
            raise self.call_failure
        if self.pause_after is not None:
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.append("pool")
                raise
        assert self.facts is not None
        assert self.facts.pooling is not None
        rows = [vector_of(one, self.facts.pooling.width) for one in inputs]
        return Pooled("", np.array(rows, "<f4").tobytes())

    def state(self) -> State:
        """Loading until there are facts, stopping once it drains."""
        if self.draining:
            return "stopping"
        return "ready" if self.facts is not None else "loading"

    def submit(self, request: Submit) -> Mailbox:
        """Start answering at once."""
        if self.state() != "ready":
            raise EngineUnavailable(f"The engine is {self.state()}.", 7)
        turn = Mailbox(request.turn, self._cancel, (request.tenant, request.session))
        number = len(self.submitted)
        self.submitted.append(request)
        if self.refusal is not None and number >= self.refuse_from:
            turn.fail(self.refusal)
        else:
            self.running.add(request.turn)
            self._turns[request.turn] = request, turn
            task = asyncio.create_task(self._answer(request, turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return turn

    @property
    def in_hand(self) -> int:
        """Turns that run."""
        return len(self.running)

    def prepare(self) -> None:
        """It is no process."""

    async def start(self) -> None:
        """It has no model."""

    async def wait_ready(self) -> ModelFacts:
        assert self.facts is not None
        return self.facts

    async def tokenizer(self) -> None:
        """It hands over none."""

    def drain(self) -> None:
        self.draining = True

    async def stop(self, flush: float = 0.0, grace: float = 5.0) -> None:
        """Refuse turns from now on."""
        self.draining = True
        self.facts = None

    def kill(self) -> None:
        self.draining = True

    def turns_away(self, tenant: str) -> TurnRefused | None:
        """Whom ``full_for`` names."""
        return TurnRefused("queue_full", "The queue is full.", 1) if tenant in self.full_for else None

    @contextmanager
    def reading(self, tenant: str) -> Iterator[None]:
        """Noted in ``read``."""
        self.read.append(tenant)
        yield

    def forget(self, tenant: str, session: str, life: int | None = None) -> None:
        """End a running turn of it and tell that nothing is left; remember that it was asked."""
        self.forgotten.append((tenant, session))
        self.lives.append(life)
        self.kv.pop((tenant, session), None)
        for request, turn in self._turns.values():
            if (request.tenant, request.session) == (tenant, session) and turn.name in self.running:
                self.running.discard(turn.name)
                turn.push(Delta(turn.name, finish_reason=FinishReason.CANCELLED))
        if self.on_forgotten is not None and life is not None:
            self.on_forgotten(tenant, session, life)

    def cancel(self, tenant: str, session: str) -> bool:
        """Stop a running turn of it."""
        return any(turn.stop() for _, turn in self._turns.values() if turn.session == (tenant, session))

    def end(self, tenant: str, session: str, failure: Exception) -> None:
        """Fail a running turn of it."""
        for _, turn in self._turns.values():
            if turn.session == (tenant, session) and turn.name in self.running:
                self.running.discard(turn.name)
                turn.fail(failure)

    def pin(self, tenant: str, session: str, until: float) -> None:
        self.pinned[tenant, session] = until

    def await_tools(self, turn: str, tools: Sequence[str]) -> None:
        """Remember which."""
        self.awaited[turn] = tuple(tools)

    def warm(self, announced: Warm) -> None:
        """Remember it."""
        self.announced.append(announced)

    async def inspect(self, tenant: str, session: str) -> Inspected:
        """All of ``kv`` lies on the device, at 64 bytes a token."""
        tokens = sum(map(len, self._held(tenant, session)))
        turns = (request for request, turn in self._turns.values() if turn.name in self.running)
        running = any((request.tenant, request.session) == (tenant, session) for request in turns)
        return Inspected("", {Tier.DEVICE: TierHolding(tokens, 64 * tokens)} if tokens else {}, running)

    async def expand(self, tenant: str, media: Sequence[MediaItem]) -> Expanded:
        """Each picture is ``PICTURE_ROWS`` rows; its text is as many placeholders."""
        known = self.pictures.setdefault(tenant, set())
        known |= {item.digest for item in media if item.data}
        made = [expansion_of(item.digest) for item in media if item.digest in known]
        return Expanded("", tuple(made), tuple(item.digest for item in media if item.digest not in known))

    async def transcribe(self, window: Transcribe) -> Transcribed:
        """What ``hears`` says of it."""
        self.heard.append(window)
        if self.call_failure is not None:
            raise self.call_failure
        await asyncio.sleep(0)
        return self.hears(window)

    async def export(self, tenant: str, session: str, folder: str, token_ids: bytes) -> Exported:
        """Write the files of ``kv``; the folder is made by it, as by the engine."""
        self.exported.append(token_ids)
        files = self._held(tenant, session)
        Path(folder).mkdir()
        for number, data in enumerate(files):
            (Path(folder) / f"{number:06}.kv").write_bytes(data)
        return Exported("", len(files), sum(map(len, files)))

    async def import_(self, tenant: str, session: str, folder: str) -> Imported:
        """Read the files into ``kv``."""
        self._held(tenant, session)
        if self.import_reason is not None:
            return Imported("", 0, self.import_reason)
        files = self.kv[tenant, session] = [file.read_bytes() for file in sorted(Path(folder).glob("*.kv"))]
        return Imported("", sum(map(len, files)))

    def _held(self, tenant: str, session: str) -> list[bytes]:
        if self.state() == "loading":
            raise EngineUnavailable("The engine is loading.", 7)
        if self.call_failure is not None:
            raise self.call_failure
        return self.kv.get((tenant, session), [])

    def _cancel(self, turn: str) -> None:
        self.cancelled.append(turn)
        if turn in self.running:
            self.running.discard(turn)
            self._turns[turn][1].push(Delta(turn, finish_reason=FinishReason.CANCELLED))

    async def _answer(self, request: Submit, turn: Mailbox) -> None:
        await self.admit.wait()
        prompt = list(unpack_ids(request.prompt))
        seen = Receipt(len(prompt), self._cached(request.tenant, prompt))
        turn.push(Delta(turn.name, receipt=self.receipts.pop(0) if self.receipts else seen))
        if request.prompt_logprobs is not None:
            entries = tuple(self._logprob(i, request.prompt_logprobs, first=n == 0) for n, i in enumerate(prompt))
            turn.push(Delta(turn.name, prompt_logprobs=entries))
        sent: list[int] = []
        for delta in self._deltas(request, turn):
            if turn.name not in self.running:
                return
            if self.ends_badly is not None and len(sent) >= self.badly_after:
                self._end_badly(turn)
                return
            if self.pause_after is not None and len(sent) >= self.pause_after:
                await self.go.wait()
            turn.push(delta)
            sent.extend(delta.tokens)
            await asyncio.sleep(0)
        self.running.discard(turn.name)
        self._timelines.append((request.tenant, prompt + sent))

    def _deltas(self, request: Submit, turn: Mailbox) -> list[Delta]:
        ids = [*self._tokens.encode(self.reply, special=False), END] if self.ids is None else list(self.ids)
        limit = request.stopping.max_tokens
        cut = len(ids)
        if request.thinking is not None:
            ids, cut = self._limited(ids, request.thinking)
        deltas: list[Delta] = []
        text = ""
        for number, token in enumerate(ids, 1):
            if limit == 0:
                break
            ends = token == END and not request.stopping.ignore_eos
            piece = "" if ends else self._tokens.decode([token])
            text += piece
            stop = next((s for s in request.stopping.stop if s in text), None)
            if stop is not None:
                piece = piece[: max(0, len(piece) - (len(text) - text.index(stop)))]
            reason = FinishReason.STOP if ends or stop is not None else None
            if reason is None and (number == limit or number == len(ids)):
                reason = FinishReason.LENGTH
            logprobs = () if request.logprobs is None else (self._logprob(token, request.logprobs),)
            told = number > cut
            delta = Delta(turn.name, (token,), piece, reason, stop, logprobs=logprobs, thinking_cut=told)
            deltas.append(
                delta if reason is None else structs.replace(delta, drafts=self.drafts, encoding=self.encoding)
            )
            if reason is not None:
                return deltas
        state = np.arange(1, 5, dtype="<f4").tobytes() if request.state else b""
        return [*deltas, Delta(turn.name, finish_reason=FinishReason.LENGTH, state=state)]

    def _limited(self, ids: list[int], budget: ThinkingBudget) -> tuple[list[int], int]:
        """What is said under a budget, and from which token on the server is told so: where the end of the reasoning is
        forced, the rest of what was to be reasoned is left out.
        """
        state = ThinkingState(budget, lambda token: self._tokens.decode([token]).encode())
        wanted, said, cut = [*ids], list[int](), len(ids)
        while wanted or state.forced is not None:
            if state.cut and cut == len(ids):
                cut = len(said)
                _, found, answer = self._tokens.decode(wanted).partition(budget.closings[0])
                wanted = [*self._tokens.encode(answer.lstrip(), special=False), END] if found else wanted
            said.append(wanted.pop(0) if state.forced is None else state.forced)
            state.accept(said[-1])
        return said, cut

    def _logprob(self, token: int, alternatives: int, first: bool = False) -> TokenLogprob:
        text = self._tokens.decode([token])
        if first:
            return TokenLogprob(token, text, text.encode(), None)
        ids = [token, *(other for other in range(10, 40) if other != token)][:alternatives]
        top = tuple(
            (i, self._tokens.decode([i]), self._tokens.decode([i]).encode(), -0.5 - rank) for rank, i in enumerate(ids)
        )
        return TokenLogprob(token, text, text.encode(), -0.5, top)

    def _cached(self, tenant: str, prompt: Sequence[int]) -> int:
        """The longest prefix that an earlier turn of this tenant left, but the last token."""
        best = 0
        for owner, timeline in self._timelines:
            if owner == tenant:
                same = 0
                while same < min(len(timeline), len(prompt) - 1) and timeline[same] == prompt[same]:
                    same += 1
                best = max(best, same)
        return best

    def _end_badly(self, turn: Mailbox) -> None:
        self.running.discard(turn.name)
        if isinstance(self.ends_badly, FinishReason):
            turn.push(Delta(turn.name, finish_reason=self.ends_badly, error="a secret of /the/engine"))
        else:
            assert self.ends_badly is not None
            turn.fail(self.ends_badly)


def died() -> EngineDied:
    """What a running turn is told when the engine process dies."""
    return EngineDied("the engine died")

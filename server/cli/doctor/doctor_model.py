"""Checks of a model: loads it in an engine of its own and reports its mode, memory, chat template and tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import zmq

from cache.tier import Tier
from scheduler.engine_config import EngineConfig
from scheduler.engine_stats import Stats
from scheduler.extras import install_command
from scheduler.model_facts import (
    ActivationRounding,
    CapturedGraphs,
    KvRounding,
    ModelFacts,
    PoolingFacts,
    WeightReading,
)
from scheduler.model_task import Task
from scheduler.protocol import Loading, ModelFailed, Ready, StepOutputs
from scheduler.speech_messages import SpeechFacts
from server.chat.dialect import Dialect
from server.chat.expansions import NAMES
from server.chat.template import Stability
from server.cli.doctor.doctor_machine import machine_memory
from server.cli.doctor.doctor_storage import existing_part
from server.cli.doctor.findings import Finding, fault, ok, size, warning
from server.config.doctor_options import DoctorConfig
from server.config.engine_options import engine_config
from server.engine.engine_link import EngineLink
from server.engine.launcher import ENGINE_COMMAND, EngineLauncher
from server.engine.process_tree import last_line, resident
from server.media.libraries import has_pillow, has_sounds
from server.models.assembly import load_tokens
from server.models.opening import first_line

LOAD_SECONDS = 1800.0
STOP_SECONDS = 5.0
LEAST_SAME = 0.9  # part of tokens whose likeliest next one --kv-dtype does not change, below which it is a warning
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
SIZES = (1_024, 8_192, 32_768)  # tokens of a session
WHERE = {tier: f"in the {tier} tier" for tier in Tier} | {
    Tier.DEVICE: "on the device",
    Tier.HOST: "in host memory",
    Tier.DISK: "on disk",
}


@dataclass(frozen=True)
class MeasuredModel:
    """What an engine told of a model: ``seconds`` to load and probe it; then bytes of ``memory`` that its process held
    and that were ``available`` beside it. Or a ``failure``: why it cannot be served, in one line; ``died``:
    the engine did not come to say so."""

    seconds: float = 0.0
    facts: ModelFacts | None = None
    stats: Stats | None = None
    memory: int = 0
    available: int = 0
    failure: str = ""
    died: bool = False


def model(config: DoctorConfig, command: Sequence[str] = ENGINE_COMMAND) -> Iterator[Finding]:
    """All about the model; nothing where none is named."""
    if not config.with_model:
        return
    measured = asyncio.run(load_model(engine_config(config), command))
    if measured.facts is None:
        short = "memory may be short: a smaller model, --dtype bfloat16 or less --kv-memory; see its last line"
        yield fault("model", measured.failure, short if measured.died else "correct MODEL or the flag that it names")
        return
    yield check_mode(config.name, measured, measured.facts)
    yield memory(measured, measured.facts)
    if measured.facts.speech is not None:
        yield hearing(measured.facts.speech)
        return
    if measured.facts.pooling is not None:
        yield pooling(measured.facts.task, measured.facts.pooling)
        return
    if (rounding := measured.facts.weight_rounding) is not None:
        yield ok("rounding", rounding.line, weights=rounding.weights, error=rounding.error, same=rounding.same)
    if (activations := measured.facts.activation_rounding) is not None:
        yield rounded_activations(activations)
    if (kv := measured.facts.kv_rounding) is not None:
        yield rounded(kv)
    if measured.facts.weight_reading is not None:
        yield check_reading(measured.facts.weight_reading)
    if (graphs := measured.facts.decode_graphs) is not None:
        yield check_graphs(graphs)
    if measured.facts.mtp_layers:
        yield heads(measured.facts.mtp_layers, measured.facts.mtp_idle)
    if measured.facts.media:
        yield media(measured.facts.media)
    if measured.facts.media_marks is not None or measured.facts.blind:
        yield check_media_marks(measured.facts)
    yield room(config, measured, measured.facts)
    yield from words(config)


async def load_model(config: EngineConfig, command: Sequence[str]) -> MeasuredModel:
    """Start an engine without a disk tier and remembered verdicts, let it load, and end it."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said, zmq.Context() as context:
        nothing_kept = {"kv_folder": None, "verdicts": None, "packed_space": 0}
        config = msgspec.structs.replace(config, address=f"ipc://{folder}/engine", **nothing_kept)
        link = EngineLink.start(config, EngineLauncher(command), context, said.fileno())
        try:
            link.configure(config)
            link.load()
            async with asyncio.timeout(LOAD_SECONDS):
                return await first_words(link, said)
        except TimeoutError:
            return MeasuredModel(failure=f"it is not loaded after {LOAD_SECONDS / 60:.0f} minutes")
        finally:
            if link.alive:
                await link.stop(0.0, STOP_SECONDS)
            await link.close()


async def first_words(link: EngineLink, said: IO[bytes]) -> MeasuredModel:
    """The engine's messages until its first heartbeat, or why there is none."""
    began, facts, seconds = time.monotonic(), None, 0.0
    async with contextlib.aclosing(link.messages()) as messages:
        async for message in messages:
            match message:
                case Loading(stage):
                    print(f"warmturn: {stage}", file=sys.stderr, flush=True)
                case ModelFailed(failure):
                    return MeasuredModel(failure=failure)
                case Ready(found):
                    facts, seconds = found, time.monotonic() - began
                case StepOutputs(_, stats) if facts is not None:
                    return MeasuredModel(seconds, facts, stats, resident(link.pid), machine_memory()[1])
    await link.close()
    return MeasuredModel(failure=f"the engine ended, {link.death()}, its last line: {last_line(said)}", died=True)


def check_mode(name: str, measured: MeasuredModel, facts: ModelFacts) -> Finding:
    """How the model is run."""
    told = f"{name} runs in mode {facts.mode}, {facts.dtype} on {facts.device}; loaded in {measured.seconds:.0f} s"
    figures = {"mode": facts.mode, "dtype": facts.dtype, "device": facts.device, "seconds": measured.seconds}
    figures |= {"probe": facts.probe, "layer_kinds": facts.layer_kinds}
    figures |= {"crossed": facts.crossed, "unproven": facts.unproven}
    if facts.unproven:
        advice = "compare a long timeline with another runtime before relying on it"
        return warning("model", f"{told}; measured on short timelines only: {facts.unproven}", advice, **figures)
    if facts.mode.startswith("alone"):
        return warning("model", told, "it runs one session at a time: other turns wait", **figures)
    return ok("model", told, **figures)


def hearing(speech: SpeechFacts) -> Finding:
    """What a model that turns speech into text takes, and whether sounds can be read here."""
    told = f"it turns speech into text, {speech.window:.0f} s at once, {speech.together} windows in a batch"
    if not has_sounds():
        fix = install_command("media")
        return fault("speech", f"{told}, but soundfile or soxr is missing: sounds are refused", fix)
    return ok("speech", told, languages=[*speech.languages], timestamps=speech.timestamps, rate=speech.rate)


def pooling(task: Task, facts: PoolingFacts) -> Finding:
    """What a model gives that generates no text."""
    kind = "scores" if task == "score" else "embeddings"
    told = f"it makes {kind}, {facts.width} numbers for an input"
    if facts.pooling:
        told += f", pooled by {' and '.join(facts.pooling)}{', of unit length' if facts.normalised else ''}"
    if not facts.pads:
        return warning(kind, told, "padding changes what it gives: only inputs of one length share a step")
    return ok(kind, told, width=facts.width, pooling=facts.pooling, prompts=[*facts.prompts])


def rounded(kv: KvRounding) -> Finding:
    """What ``--kv-dtype`` changes."""
    figures = {"kv_dtype": kv.kv_dtype, "layers": kv.layers, "error": kv.error, "same": kv.same}
    if kv.refused:
        return warning("kv", kv.line, "leave --kv-dtype out for this model", refused=kv.refused, **figures)
    if kv.same is not None and kv.same < LEAST_SAME:
        return warning("kv", kv.line, "compare its replies with those of --kv-dtype auto", **figures)
    return ok("kv", kv.line, **figures)


def rounded_activations(found: ActivationRounding) -> Finding:
    """What ``--activations`` changes."""
    figures = {"activations": found.activations, "error": found.error, "same": found.same}
    if found.refused:
        fix = "leave --activations out for this model"
        return warning("activations", found.line, fix, refused=found.refused, **figures)
    return ok("activations", found.line, **figures)


def media(kinds: Sequence[str]) -> Finding:
    """What the model takes beside text, and whether that can be read here."""
    told = f"the model takes {' and '.join(kinds)} beside text"
    if "image" in kinds and not has_pillow():
        return fault("media", f"{told}, but Pillow is missing: pictures are refused", install_command("media"))
    if "audio" in kinds and not has_sounds():
        lacking = "soundfile or soxr is missing: sounds are refused"
        return fault("media", f"{told}, but {lacking}", install_command("media"))
    return ok("media", told, kinds=[*kinds])


def check_graphs(graphs: CapturedGraphs) -> Finding:
    """The CUDA graphs of decode steps."""
    if graphs.rows and not graphs.refused:
        return ok("graphs", graphs.line, rows=graphs.rows)
    advice = "decode steps without a graph are launched kernel by kernel, which takes longer with few sessions"
    return warning("graphs", graphs.line, advice, rows=graphs.rows, refused=graphs.refused)


def heads(layers: int, idle: str) -> Finding:
    """The model's own layers for multi-token prediction, and whether they draft."""
    told = f"the configuration has {layers} layer{'s' * (layers > 1)} for multi-token prediction, which "
    told += f"are not used: {idle}" if idle else "draft for --speculate auto"
    return ok("drafting", told, mtp_layers=layers, used=not idle)


def check_media_marks(facts: ModelFacts) -> Finding:
    """Whether it takes pictures or sounds, and how they enter."""
    if facts.media_marks is not None:
        told = "; ".join(f"it takes {NAMES[marks.kind]}, which enter {marks.way}" for marks in facts.marks)
        told += "".join(f"; of {NAMES[marks.kind]}, one in a conversation" for marks in facts.marks if marks.single)
        told += "; those of one conversation are of one kind" if facts.media_apart else ""
        return ok("pictures", told, way=facts.media_marks.way)
    advice = "it is served for text only; pictures and sounds in requests are refused"
    told = f"it was made for pictures or sounds and takes none: {facts.blind}"
    return warning("pictures", told, advice, blind=facts.blind)


def memory(measured: MeasuredModel, facts: ModelFacts) -> Finding:
    """Where the memory goes."""
    told = f"{facts.parameters / 1e6:,.1f} million parameters in {size(facts.weight_bytes)}, used in {facts.dtype}; "
    told += f"{facts.kv_bytes_per_token:,} bytes of KV a token, context {facts.max_context:,} tokens"
    lengths = {int(length): each for length, each in facts.kv_bytes_by_length.items()}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{taken:,} at {length:,}" for length, taken in lengths.items())
        told += f"; windowed layers keep a window: a token takes {each} tokens"
    if measured.memory:
        told += f"; the engine holds {size(measured.memory)} of memory now"
    grows = facts.pages * facts.page_size * facts.kv_bytes_per_token
    figures: dict[str, Any] = {
        "parameters": facts.parameters,
        "bytes": facts.weight_bytes,
        "max_context": facts.max_context,
    }
    figures |= {"kv_bytes_per_token": facts.kv_bytes_per_token, "kv_bytes_by_length": facts.kv_bytes_by_length}
    figures |= {"engine_memory": measured.memory, "kv_memory": grows}
    if facts.device == "cpu" and 0 < measured.available < grows:
        return warning(
            "weights",
            f"{told}; KV may grow to {size(grows)}, and {size(measured.available)} are available",
            "lower --kv-memory; otherwise the system may kill the engine when memory is full",
            **figures,
        )
    return ok("weights", told, **figures)


def check_reading(found: WeightReading) -> Finding:
    """How fast products read weights, and what memory would allow."""
    told = f"products of one row read {found.speed / 1e9:.1f} GB/s of weights, {100 * found.share:.0f} % of the "
    told += f"{found.memory / 1e9:.1f} GB/s that memory gives ({found.threads} threads, {100 * found.huge_pages:.0f} % "
    told += f"in huge pages); timed when this model was first loaded, {'; '.join(found.lines)}"
    return ok("reading", told, share=found.share, **msgspec.to_builtins(found))


def room(config: DoctorConfig, measured: MeasuredModel, facts: ModelFacts) -> Finding:
    """How many sessions of which length fit into each tier at once."""
    assert measured.stats is not None
    table = []
    kept = config.kv_at_rest == "exact" or (facts.kv_rounding is not None and facts.kv_rounding.layers)
    smaller = 1 if kept else ITEM[facts.dtype]
    capacity = {tier: measured.stats.tier(tier).capacity for tier in Tier if tier.paged} | {Tier.DEVICE: facts.pages}
    for length in [length for length in SIZES if length < facts.max_context] + [facts.max_context]:
        pages = -(-length // facts.page_size)
        each = facts.kv_bytes_by_length.get(str(length), facts.kv_bytes_per_token)
        fit = {
            tier: int(most * facts.kv_bytes_per_token // (pages * each)) if each else most // pages
            for tier, most in capacity.items()
        }
        if stored := length * facts.kv_bytes_per_token / smaller:
            fit[Tier.DISK] = int(disk_budget(config) // stored)
        table.append((length, fit))
    told = "; ".join(
        f"of {length:,} tokens: " + ", ".join(f"{count:,} {WHERE[tier]}" for tier, count in fit.items() if count)
        for length, fit in table
    )
    text, figures = f"sessions that fit at once, {told}", [{"tokens": length, **fit} for length, fit in table]
    if not table[-1][1][Tier.DEVICE]:
        return warning(
            "room", text, "a session of the longest context does not fit: raise --kv-memory", sessions=figures
        )
    return ok("room", text, sessions=figures)


def disk_budget(config: DoctorConfig) -> int:
    """Bytes of KV on disk: what is asked for, or the tenth of what is free."""
    if config.disk_space is not None:
        return int(config.disk_space)
    return shutil.disk_usage(existing_part(config.data_dir)).free // 10


def words(config: DoctorConfig) -> Iterator[Finding]:
    """The chat template: whether it is prefix-stable, and how reasoning and tool calls are written."""
    try:
        tokens, stable = load_tokens(config)
    except Exception as error:  # transformers raises what it likes
        yield fault("words", f"the tokenizer cannot be loaded: {first_line(error)}", "check the model's files")
        return
    try:
        yield template(tokens.has_template, stable)
        yield tools(tokens.dialect, tokens.has_template)
    finally:
        tokens.close()


def template(there: bool, found: Stability) -> Finding:
    """Whether a client that sends its whole history has it found in the cache."""
    if not there:
        advice = "only /v1/completions works; put a chat_template.jinja beside the weights, or for a model with "
        advice += f"Mistral's tekken.json: {install_command('mistral')}"
        return warning("template", "there is no chat template", advice)
    if found.prefix_stable is None:
        return warning("template", "it accepted none of the test conversations", "try a chat with it")
    if found.diverges is None:
        return ok("template", "it keeps prefixes: clients can send their whole history", prefix_stable=True)
    told = f"it changes what was there before: at {found.diverges.at} {found.diverges.expected!r} becomes "
    return warning(
        "template",
        f"{told}{found.diverges.got!r}",
        "send only new messages, with a session_id: otherwise that part of the history is computed in every turn",
        prefix_stable=False,
    )


def tools(dialect: Dialect, there: bool) -> Finding:
    """How the model writes calls and reasoning."""
    if dialect.declared is not None:
        return ok("tools", "calls and reasoning are declared by its response template")
    if dialect.native and dialect.form is not None:
        calls = f"calls of tools begin with {dialect.form.opening!r}"
    elif dialect.native:
        calls = "the template takes tools; the form of calls was not found, so replies come as they are"
    else:
        calls = "the template knows no tools: they are told in words" if there else "none"
    thought = dialect.thought
    reasoning = f"reasoning stands in {thought.opening} {thought.closing}" if thought else "no reasoning is told apart"
    return ok("tools", f"{calls}; {reasoning}", native=dialect.native)

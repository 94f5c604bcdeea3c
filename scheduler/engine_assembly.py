"""Puts an engine together: ``build_engine`` makes its parts for a loaded model, and what the server is told of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from cache.store import SessionStore
from cache.tiers.archive import Archive
from scheduler.accel.cpu import ways
from scheduler.adapters.adapter_set import AdapterSet
from scheduler.core.adapter_commands import load_adapters, refuse_adapters
from scheduler.core.constraint import Grammars, grammar_tokenizer
from scheduler.core.drafters import AskedDrafter
from scheduler.core.engine_core import EngineCore
from scheduler.core.heads_drafter import HeadsDrafter
from scheduler.core.model_drafter import ModelDrafter
from scheduler.core.scheduler import Scheduler
from scheduler.core.sessions_index import SessionsIndex
from scheduler.core.speculator import Speculator
from scheduler.core.text import Vocabulary
from scheduler.core.turn_limits import Limits
from scheduler.engine_config import EngineConfig
from scheduler.forward.modes import language_model
from scheduler.media.eyes import Eyes
from scheduler.media.media_store import MediaStore
from scheduler.media.row_files import BUDGET, RowFiles
from scheduler.model.cuda_capture import CudaCapture
from scheduler.model.decode_graphs import DecodeGraphs
from scheduler.model.draft_heads import load_heads, mtp_layers
from scheduler.model.draft_model import divide_memory
from scheduler.model.loader import PAGE_SIZE, LoadedModel, fingerprint
from scheduler.model.measurement import describe
from scheduler.model.memory import build_archive, build_store, spare
from scheduler.model.runner import ModelRunner
from scheduler.model_facts import CapturedGraphs, MediaMarks, ModelFacts, WeightReading
from scheduler.protocol import (
    Loading,
)

log = logging.getLogger("warmturn.engine")

_LENGTHS = (1024, 8192, 32768)  # tokens of the sessions whose bytes a token are told
_ROWS_SHARE = 8  # of the bytes for KV on disk at most so much is for rows of pictures, as a divisor
_STEP_TOKENS = {"cpu": 512, "cuda": 2048}


def build_engine(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None = None,
    tell: Callable[[Loading], None] = lambda message: None,
) -> tuple[EngineCore, ModelFacts]:
    """The engine of a loaded model and its ``draft`` model, and what to tell the server about it. ``tell`` gets
    progress. Raises ``TooSmall``, and ``LoadFailed`` for an adapter.
    """
    device, mode = loaded.model.device, loaded.verdict.mode
    config, asked, idle = choose_drafter(config, loaded, draft)
    store = build_store(config, loaded.verdict, PAGE_SIZE, device, loaded.rope.threshold, loaded.followers)
    store.skeleton = loaded.verdict.skeleton
    if mode.caches:
        store.attach(build_archive(config, store, fingerprint(loaded)))
    # One page is kept for copy-on-write, so that the longest turn can always run alone.
    room = store.pool.room
    context = min(config.max_context or loaded.context, loaded.context, room)
    if room < loaded.context and config.max_context is None:  # else the server tells that it is not what was asked for
        log.warning("--kv-memory: the context is %d tokens, as no more fit; the model has %d", room, loaded.context)
    scheduler = Scheduler(
        store,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens or _STEP_TOKENS[device.type],
        max_queued=config.max_queued,
        reuse=mode.caches,
    )
    graphs = capture_graphs(config, loaded, store, context, tell)
    adapters = make_adapters(config, loaded, tell)
    runner = ModelRunner(mode, store.pool.device, loaded.rope, graphs, loaded.followers, adapters)
    vocab = loaded.model.get_input_embeddings().num_embeddings
    width = getattr(loaded.model.get_output_embeddings(), "out_features", None)
    media_store = know_media(config, loaded, store.archive)
    limits = Limits(context, vocab, loaded.start, width, media_store is not None)
    grammars = Grammars(partial(grammar_tokenizer, loaded.tokenizer, loaded.eos_token_ids, vocab))
    grammars.prepare()
    speculator = None
    if config.speculate != "off":
        speculator = Speculator(SessionsIndex(store), context, store.stateful, asked)
    vocabulary = Vocabulary(loaded.tokenizer)
    engine = EngineCore(runner, scheduler, vocabulary, loaded.eos_token_ids, limits, grammars, speculator, media_store)
    facts = facts_of(config, loaded, store, context, graphs, idle)
    return engine, msgspec.structs.replace(facts, adapters=tuple(adapter.facts for adapter in adapters))


def choose_drafter(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedModel | None
) -> tuple[EngineConfig, AskedDrafter | None, str]:
    """What drafts tokens when it is asked: ``draft``, else heads of the model itself. Returns also the configuration
    with the memory that is left for the model's own KV, and why such heads do not draft.
    """
    if draft is not None:
        total = config.kv_memory or spare(loaded.model.device, config.tensor_parallel)
        config, small = divide_memory(config, total, loaded, draft)
        idle = "--speculate is off" if config.speculate == "off" else "--draft-model drafts instead"
        return config, build_drafter(small, draft, loaded), idle
    if config.speculate == "off":
        return config, None, "--speculate is off"
    heads, idle = load_heads(loaded)
    return config, HeadsDrafter(heads, loaded.model.get_decoder()) if heads is not None else None, idle


def know_media(config: EngineConfig, loaded: LoadedModel, archive: Archive | None) -> MediaStore | None:
    """The media of a model with eyes, with their rows beside the KV on disk, if there is any."""
    if loaded.eyes is None:
        return None
    name = fingerprint(loaded)
    rows = None
    if archive is not None and config.kv_folder is not None:
        disk = archive.disk
        most = min(BUDGET, disk.space.budget // _ROWS_SHARE)
        rows = RowFiles(Path(config.kv_folder) / name / "rows", disk.space.floor, most, disk.set_beside)
    return MediaStore(loaded.eyes, files=rows, fingerprint=name)


def make_adapters(config: EngineConfig, loaded: LoadedModel, tell: Callable[[Loading], None]) -> AdapterSet:
    """The adapters of a loaded model, with those that it begins with. Raises ``LoadFailed``."""
    decoder, refusal = language_model(loaded.model), refuse_adapters(loaded, config.tensor_parallel)
    adapters = AdapterSet(loaded.model, decoder, loaded.packing, refusal, loaded.verdict.mode.trace.late)
    if config.adapters:
        tell(Loading("loading adapters"))
        load_adapters(adapters, config.adapters)
    return adapters


def capture_graphs(
    config: EngineConfig, loaded: LoadedModel, store: SessionStore, context: int, tell: Callable[[Loading], None]
) -> DecodeGraphs | None:
    """CUDA graphs of decode steps of sessions up to ``context`` tokens. None on a CPU, and where Python decides in
    every step how a threshold turns positions, or what other ranks are told.
    """
    device = loaded.model.device
    if device.type != "cuda" or loaded.rope.threshold is not None or loaded.followers is not None:
        return None
    mode, residency = loaded.verdict.mode, store.residency
    states = residency.state_budget // 2
    graphs = DecodeGraphs(mode, store.pool.device, config.max_running, context, CudaCapture(), states)
    graphs.capture_all(
        tell=lambda done, count: tell(Loading(f"capturing CUDA graphs, {done} of {count}")),
        used=partial(torch.cuda.memory_reserved, device),
    )
    residency.state_budget -= graphs.reserved
    return graphs


def facts_of(
    config: EngineConfig,
    loaded: LoadedModel,
    store: SessionStore,
    context: int,
    graphs: DecodeGraphs | None,
    idle: str,
) -> ModelFacts:
    """What the server is told of a loaded model, whose sessions have up to ``context`` tokens. ``idle``: why its MTP
    layers, if it has some, draft nothing.
    """
    verdict, pool, device, media = loaded.verdict, store.pool, loaded.model.device, marks_of(loaded.eyes)
    lengths = sorted({*_LENGTHS, context})
    return ModelFacts(
        architecture=type(loaded.model).__name__,
        parameters=loaded.parameters,
        weight_bytes=loaded.weight_bytes,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=loaded.model.get_input_embeddings().num_embeddings,
        max_context=context,
        eos_token_ids=loaded.eos_token_ids,
        mode=describe(verdict.mode),
        probe=verdict.report,
        layer_kinds=loaded.layer_kinds,
        kv_bytes_per_token=verdict.token_bytes if loaded.followers is None else pool.device.token_bytes,
        kv_bytes_by_length={str(length): pool.session_bytes(length) // length for length in lengths},
        page_size=PAGE_SIZE,
        pages=pool.device.frames.pages(pool.device.slots),
        fingerprint=fingerprint(loaded),
        encoder_decoder=bool(loaded.start),
        mtp_layers=mtp_layers(loaded.model.config),
        mtp_idle=idle,
        tensor_parallel=config.tensor_parallel,
        generation=loaded.generation,
        crossed=verdict.crossed,
        unproven=verdict.unproven,
        weight_rounding=loaded.rounding,
        activation_rounding=loaded.activations,
        kv_rounding=verdict.kv,
        weight_reading=weight_reading(loaded) if device.type == "cpu" else None,
        decode_graphs=CapturedGraphs(graphs.captured, graphs.refused) if graphs is not None else None,
        media=tuple(marks.kind for marks in media),
        media_marks=media[0] if media else None,
        further_marks=media[1:],
        media_apart=loaded.eyes is not None and loaded.eyes.apart,
        blind=loaded.blind,
        licence=loaded.licence,
        own_context=loaded.context,
    )


def weight_reading(loaded: LoadedModel) -> WeightReading | None:
    """How fast products read weights; by now it is known how many experts a token chooses. None if none are packed."""
    size = 0 if loaded.packing is None else loaded.packing.bytes_of_row
    return msgspec.structs.replace(ways.latest, weight_bytes=size) if ways.latest is not None and size else None


def marks_of(eyes: Eyes | None) -> tuple[MediaMarks, ...]:
    """How prompts name media of each kind."""
    return tuple(
        MediaMarks(
            one.processor.mark,
            one.sight.placeholder,
            str(one.sight.way),
            one.processor.fingerprint,
            one.kind,
            one.sight.single,
        )
        for one in (eyes.every if eyes is not None else ())
    )


def build_drafter(config: EngineConfig, draft: LoadedModel, served: LoadedModel) -> ModelDrafter:
    """What proposes the draft model's tokens, with a store and tiers within the budgets of ``config``. Raises
    ``TooSmall``.
    """
    store = build_store(config, draft.verdict, PAGE_SIZE, draft.model.device, draft.rope.threshold)
    store.skeleton = draft.verdict.skeleton
    store.attach(build_archive(config, store, fingerprint(draft)))
    pool = store.pool
    runner = ModelRunner(draft.verdict.mode, pool.device, draft.rope)
    width = served.model.get_input_embeddings().num_embeddings
    context = min(draft.context, pool.room)
    return ModelDrafter(runner, store, width, context)

"""Loading a model: its checkpoint, generation config, packing and the probe."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from cache.error_line import first_line
from cache.memory.codec import Codec
from cache.memory.heap import give_back
from cache.pages.layers import AttentionLayer, read_layers
from scheduler import cores
from scheduler.accel.cpu.activations import measure_activations, round_activations
from scheduler.accel.cpu.experts import pack_experts
from scheduler.accel.cpu.kept_tiles import KeptTiles
from scheduler.accel.cpu.linear import pack
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.quantised import keep_packed
from scheduler.accel.cpu.rounding import Rounding
from scheduler.accel.gpu.compiled import CompileOptions
from scheduler.engine_config import EngineConfig
from scheduler.forward.depthwise import hasten
from scheduler.forward.rope import LongRope
from scheduler.forward.seq2seq import first_tokens
from scheduler.media.eyes import Eyes
from scheduler.model import load_errors
from scheduler.model.checkpoint import read_config, read_model, read_tokenizer
from scheduler.model.eyes_finder import find_eyes, senses_of
from scheduler.model.generation_defaults import FILE, generation_of, read_generation
from scheduler.model.known_model import KnownModel, packed_by
from scheduler.model.licence import licence_of
from scheduler.model.measurement import describe
from scheduler.model.probe import UnsupportedModel, probe
from scheduler.model.tokenizer import take_apart
from scheduler.model.verdict import Verdict
from scheduler.model.weights import digest, stored_bytes
from scheduler.model_facts import ActivationRounding, WeightRounding
from scheduler.parallel import division
from scheduler.parallel.followers import Followers
from scheduler.parallel.ranks import RankLost
from scheduler.protocol import Loading, TokenizerRead
from scheduler.sampling_params import Generation
from scheduler.weights.gguf.header import forget_headers

log = logging.getLogger("warmturn.engine")
_GPU_FILE = Path("/proc/driver/nvidia/version")  # of the kernel's driver

PAGE_SIZE = 16  # tokens; reuse is exact to the token whatever it is (copy-on-write)
_ENDLESS = 32_768  # context in tokens of a model that names no limit


class LoadFailed(Exception):
    """The model cannot be served; the message is one line for people."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    model: Any
    tokenizer: Any
    layers: list[AttentionLayer]
    verdict: Verdict
    rope: LongRope
    start: tuple[int, ...]  # what the decoder of an encoder-decoder model begins with; empty for the others
    eos_token_ids: tuple[int, ...]
    context: int
    digest: str  # of config and weights
    parameters: int  # how many
    weight_bytes: int  # as they are stored, quantised or not
    followers: Followers | None = None  # the other ranks of a model that is divided
    generation: Generation = field(default_factory=Generation)  # what holds where a request is silent
    rounding: WeightRounding | None = None  # what --weights changed
    activations: ActivationRounding | None = None  # what --activations changed
    eyes: Eyes | None = None  # of a model that takes pictures
    packing: Packing | None = None  # its weights as programs multiply with them
    blind: str = ""  # why a model that was made for pictures takes none
    licence: str = ""  # as its card names it

    @property
    def layer_kinds(self) -> dict[str, int]:
        return dict(Counter(layer.reach.value if layer.stores else "shared" for layer in self.layers))

    def keep_packed(self) -> None:
        """Begin to write packed weights for the next start, if it is not done and worth it."""
        if self.packing is not None and self.packing.kept is not None:
            self.packing.kept.keep()


def load(config: EngineConfig, tell: Any) -> LoadedModel:
    """Load and probe ``config.model``; ``tell`` gets ``Loading`` messages and the tokenizer. Raises ``LoadFailed``."""
    device = device_of(config.device)
    cores.share()
    tell(Loading("reading the configuration"))
    followers: Followers | None = None
    try:
        _check_activations(config, device)
        settings, tokenizer = read_config(config), read_tokenizer(config)
        tell(TokenizerRead(take_apart(tokenizer)))
        chosen = _chosen_config(config)
        if config.tensor_parallel > 1:
            if config.kv_dtype != "auto":
                raise ValueError(f"--kv-dtype {config.kv_dtype}: not with --tensor-parallel")
            if obstacle := division.obstacle(settings, config.tensor_parallel, device):
                raise ValueError(f"--tensor-parallel {config.tensor_parallel}: {obstacle}")
            tell(Loading("starting the other ranks"))
            followers = Followers(config, device)
        tell(Loading("loading the weights"))
        round_activations(None)  # until the model is measured
        model, weights = read_model(config, settings, device)
        said, source = (_own(model), "model") if chosen is None else chosen
        generation = generation_of(said, source)
        rounding = _round_weights(config, model, device)
        if device.type == "cpu":
            cores.fit(model)
        tell(Loading("measuring how the model can be run"))
    except Exception as error:  # a broken file raises whatever its reader likes
        why = load_errors.reason(error, config.model)
        raise LoadFailed(f"cannot load {config.model!r}: {why}{_end_followers(followers)}") from error
    try:
        verdicts = Path(config.verdicts) if config.verdicts else None
        name, codec = _name(weights, config), _codec(config)
        kept = KeptTiles(name, packed_by(), config.packed_space, weights) if device.type == "cpu" else None
        asked = (codec, config.activations, kept)
        loaded = prepare(model, tokenizer, verdicts, followers, tell, name, rounding, *asked)
        if senses_of(model):
            tell(Loading("measuring how it takes pictures or sounds"))
        divided = followers is not None
        eyes, blind = find_eyes(model, config.model, tokenizer, loaded.verdict, PAGE_SIZE, loaded.rope, divided)
        ends = _ends(model, tokenizer, said.get("eos_token_id"))
        round_activations(loaded.activations)
        bytewise = loaded.activations is not None and not loaded.activations.refused
        if bytewise and loaded.packing is not None:
            loaded.packing.choose_ways()  # inputs have other sizes now
        licence = licence_of(config.model)
        forget_headers()
        return replace(loaded, generation=generation, eos_token_ids=ends, eyes=eyes, blind=blind, licence=licence)
    except (LoadFailed, RankLost) as error:
        why = f"no mode gives correct results: {error}{_end_followers(followers)}{_way_out(model)}"
        raise LoadFailed(f"cannot serve {config.model!r}: {why}") from error


def _way_out(model: Any) -> str:
    """What may help where a model was refused: modes are compared with a plain forward, and 16 bits round both."""
    return "; try --dtype float32" if getattr(model, "dtype", None) in (torch.bfloat16, torch.float16) else ""


def _end_followers(followers: Followers | None) -> str:
    """Which other rank has ended by itself, for people; now all of them end."""
    if followers is None:
        return ""
    followers.close()
    return f" ({followers.lost})" if followers.lost is not None else ""


def _round_weights(config: EngineConfig, model: Any, device: torch.device) -> Rounding | None:
    """Round the weights of ``model`` if that is asked for. Raises ``ValueError``."""
    if config.weights == "auto":
        return None
    if device.type != "cpu":
        raise ValueError(f"--weights {config.weights} is for CPUs; for a GPU, serve a checkpoint that is quantised")
    if config.tensor_parallel > 1:
        raise ValueError(f"--weights {config.weights}: not with --tensor-parallel")
    return Rounding(model, config.weights)


def _check_activations(config: EngineConfig, device: torch.device) -> None:
    """Raises ``ValueError`` where ``--activations`` has no meaning."""
    if config.activations != "auto" and device.type != "cpu":
        raise ValueError(f"--activations {config.activations} is for CPUs")
    if config.activations != "auto" and config.tensor_parallel > 1:
        raise ValueError(f"--activations {config.activations}: not with --tensor-parallel")


def _name(weights: str, config: EngineConfig) -> str:
    """The digest of the weights as they are served."""
    if config.weights == "auto":
        return weights
    return hashlib.blake2b(f"{weights} {config.weights}".encode(), digest_size=16).hexdigest()


def _codec(config: EngineConfig) -> Codec:
    """How KV is to be kept in memory."""
    return Codec.EXACT if config.kv_dtype == "auto" else Codec(config.kv_dtype)


def _chosen_config(config: EngineConfig) -> tuple[Mapping[str, Any], str] | None:
    """The generation config that the operator chose, and its source; None: the model's own. Raises ``ValueError``, also
    for one of the model's that cannot be read: transformers would go on without it."""
    if config.generation_config == "model":
        load_errors.check_json(load_errors.folder_of(config.model) / FILE)
        return None
    if config.generation_config == "openai":
        return {}, "openai"
    said = read_generation(Path(config.generation_config))
    generation_of(said, "file")  # what is wrong with it is told before the weights are loaded
    return said, "file"


def _own(model: Any) -> Mapping[str, Any]:
    """The generation config of a checkpoint, as far as it says anything."""
    own = model.generation_config
    return {} if own is None else {name: value for name, value in own.to_dict().items() if value is not None}


def prepare(
    model: Any,
    tokenizer: Any,
    verdicts: Path | None = None,
    followers: Followers | None = None,
    tell: Any = lambda _: None,
    weights: str | None = None,
    rounding: Rounding | None = None,
    codec: Codec = Codec.EXACT,
    activations: str = "auto",
    kept: KeptTiles | None = None,
) -> LoadedModel:
    """Probe a model in memory. Raises ``LoadFailed`` with the reasons where no mode runs it right.

    ``verdicts`` is a folder that remembers, by the model's digest, what earlier loads found out. ``followers`` have the
    other parts of the model. ``tell`` gets ``Loading`` messages. ``weights`` is its digest where that is known.
    ``rounding``: what was done to its weights, which is measured. ``codec``: how KV is to be kept in memory.
    ``activations``: what is asked for inputs of products; that is measured, and ``round_activations`` uses it.
    ``kept``: where its weights in tiles are kept between starts.
    """
    text = model.config.get_text_config(decoder=True)
    context = _context(text, tokenizer)
    weights = weights or digest(model)  # before any forward: some quantised modules repack themselves then
    parameters, size = model.num_parameters(), stored_bytes(model)  # packing parts tied ones
    hasten(model)
    try:
        layers = read_layers(text)
        rope = LongRope(model)
        packing: Packing | None = None
        bytewise: ActivationRounding | None = None
        if followers is None:
            known = verdicts / f"{weights}-{transformers.__version__}" if verdicts is not None else None
            found, options = KnownModel.read(known), _compile_options(model, tell)
            packing = _pack(model, found, rounding, kept)
            bytewise = measure_activations(model) if activations != "auto" else None
            verdict = _probe(model, layers, rope, found, options, context, packing, codec)
            if bytewise is not None and not packing:
                bytewise = ActivationRounding(activations, None, None, "no mode is right with packed weights")
            KnownModel(describe(verdict.mode), found.answers, verdict.measured).write(known)
        else:
            followers.mirror(model)
            verdict = probe(model, layers, PAGE_SIZE, rope, followers=followers, context=context)
    except UnsupportedModel as error:
        raise LoadFailed(first_line(error)) from error
    give_back()
    _tell_thresholds(verdict)
    starts = first_tokens(model) if model.config.is_encoder_decoder else ()
    ends, rounded = _ends(model, tokenizer), None if rounding is None else rounding.found
    facts = (starts, ends, context, weights, parameters, size)
    loaded = LoadedModel(model, tokenizer, layers, verdict, rope, *facts, followers, packing=packing)
    return replace(loaded, rounding=rounded, activations=bytewise)


def _tell_thresholds(verdict: Verdict) -> None:
    """What the log says of timelines that are longer than those that were measured."""
    if verdict.crossed:
        log.info("also measured past %s, on a copy of the model with small values of these", ", ".join(verdict.crossed))
    if verdict.unproven:
        log.warning("how the model is run was measured on short timelines only: %s", verdict.unproven)


def _compile_options(model: Any, tell: Any) -> CompileOptions | None:
    """Layers are compiled for GPUs; on a CPU there are programs of ours, and compiling takes longer."""
    return CompileOptions(tell=lambda: tell(Loading("compiling layers"))) if model.device.type == "cuda" else None


def _pack(model: Any, known: KnownModel, rounding: Rounding | None, kept: KeptTiles | None) -> Packing:
    """Pack the weights that are not ``kept``."""
    packing = pack(model, known.answers, kept)
    pack_experts(model, packing)
    keep_packed(model, packing)
    give_back()  # what packing took, before measuring takes more
    packing.choose_ways()
    if rounding is not None:
        rounding.measure(model)
    return packing


def _probe(
    model: Any,
    layers: list[AttentionLayer],
    rope: LongRope,
    known: KnownModel,
    compiling: CompileOptions | None,
    context: int,
    packing: Packing,
    codec: Codec,
) -> Verdict:
    """Probe; unpack the weights where no mode is right with packed ones. Raises ``UnsupportedModel``."""
    measured = partial(probe, model, layers, PAGE_SIZE, rope, known, compiling=compiling, context=context)
    try:
        return measured(packing=packing, codec=codec)
    except UnsupportedModel:
        if not packing:
            raise
        packing.remove()
        return measured(codec=codec)


def fingerprint(loaded: LoadedModel) -> str:
    """A digest of all that KV depends on: the model (see ``digest``), its tokenizer's template and size, the mode, and
    how KV is kept if not exactly, or as rows, and how inputs of products are rounded if to 8 bits.
    """
    facts: tuple[str | int, ...] = (
        *(str(loaded.tokenizer.chat_template), len(loaded.tokenizer)),
        describe(loaded.verdict.mode),
    )
    if loaded.verdict.codec is not Codec.EXACT:
        facts += (str(loaded.verdict.codec),)
    if loaded.activations is not None and not loaded.activations.refused:
        facts += (f"activations {loaded.activations.activations}",)
    if any(shape.joined for shape in loaded.verdict.shapes.values()):
        facts += ("joined",)
    return hashlib.blake2b(f"{loaded.digest} {facts!r}".encode(), digest_size=16).hexdigest()


def device_of(wanted: str) -> torch.device:
    """The device that ``--device`` means. Raises ``LoadFailed``."""
    if wanted == "cuda" and not torch.cuda.is_available():
        why = _no_gpu()
        raise LoadFailed(f"no CUDA device can be used here{f' ({why})' if why else ''}; try --device cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cpu" and (why := _no_gpu()) and _GPU_FILE.exists():
            log.warning(
                "the model runs on the CPU, though there is an NVIDIA GPU: %s; update its driver, or install a torch "
                "for the CUDA version that the driver knows",
                why,
            )
    return torch.device(wanted, 0) if wanted == "cuda" else torch.device(wanted)


def _no_gpu() -> str:
    """Why torch finds no GPU, in its words; empty for a build without CUDA."""
    if torch.version.cuda is None:
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, no GPU
        return first_line(error, 200)
    return "it finds none"


def _ends(model: Any, tokenizer: Any, chosen: Any = None) -> tuple[int, ...]:
    """The ids that end a reply: those ``chosen``, else of the model's generation config, else of its config; and the
    tokenizer's own.
    """
    listed = getattr(model.generation_config, "eos_token_id", None) if chosen is None else chosen
    if listed is None:
        listed = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None))


def _context(config: Any, tokenizer: Any) -> int:
    """The longest timeline in tokens that the model was made for."""
    for name in ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    limit = tokenizer.model_max_length
    return int(limit) if limit < 10**9 else _ENDLESS

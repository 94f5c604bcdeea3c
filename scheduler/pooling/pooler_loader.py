"""Loading a model that embeds or scores, with what its recipe puts behind it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.tokenization_utils_base import LARGE_INTEGER

from scheduler import cores
from scheduler.accel.cpu.experts import pack_experts
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.quantised import keep_packed
from scheduler.engine_config import EngineConfig
from scheduler.model import gguf, load_errors
from scheduler.model.checkpoint import read_config, read_tokenizer
from scheduler.model.licence import licence_of
from scheduler.model.loader import LoadFailed, device_of
from scheduler.model.tokenizer import take_apart
from scheduler.model.weights import AllOperators, digest, stored_bytes
from scheduler.model_facts import ModelFacts, PoolingFacts
from scheduler.pooling.modules import PoolingModule, activation, vector_module
from scheduler.pooling.pooler import Pooler, VectorHead
from scheduler.pooling.recipe import BadRecipe, PoolingRecipe
from scheduler.pooling_messages import PoolInput
from scheduler.protocol import Loading, TokenizerRead, pack_ids
from scheduler.weights.gguf.header import forget_headers
from scheduler.weights.gguf.path import find_file

log = logging.getLogger("warmturn.engine")

ENDLESS = 32_768  # tokens of an input where nothing says how many a model takes
PROBE = range(3, 11)  # token ids of a short input
TRIED = 2048  # tokens: so long inputs are tried at most


@dataclass(frozen=True)
class CheckpointFacts:
    """What is told of a checkpoint's weights, as they are stored."""

    digest: str
    nbytes: int
    parameters: int


def load_pooler(
    config: EngineConfig, recipe: PoolingRecipe, tell: Callable[[Loading | TokenizerRead], None]
) -> tuple[Pooler, ModelFacts]:
    """The model of ``config`` as its recipe says, and what the server is told of it. ``tell`` gets progress and the
    tokenizer. Raises ``LoadFailed``.
    """
    device = device_of(config.device)
    cores.share()
    try:
        settings, tokenizer = read_config(config), read_tokenizer(config)
        if recipe.lowercase:
            lower_case(tokenizer)
        tell(TokenizerRead(take_apart(tokenizer)))
        tell(Loading("loading the weights"))
        model, lacking, found = read_stored(config, settings, recipe, device)
        stored = CheckpointFacts(found, stored_bytes(model), model.num_parameters())
        pooler = make_pooler(model, recipe, tokenizer, device)
        packing = keep(pooler.model, device)
        tell(Loading("measuring how the model can be run"))
        check_lacking(pooler, lacking)
        pooler.measure(pooler.model.get_input_embeddings().num_embeddings, packing.tolerance)
        packing.settle()
        facts = facts_of(config, recipe, pooler, stored, longest_input(recipe, pooler.model.config, tokenizer))
    except Exception as error:  # a broken file raises whatever its reader likes
        why = str(error) if isinstance(error, BadRecipe) else load_errors.reason(error, config.model)
        raise LoadFailed(f"cannot load {config.model!r}: {why}") from error
    forget_headers()
    warn_of_unused(config)
    return pooler, facts


def make_pooler(model: Any, recipe: PoolingRecipe, tokenizer: Any, device: torch.device) -> Pooler:
    """The model, or its encoder, on its device with what the recipe puts behind it. Raises ``BadRecipe``."""
    pad_id = padding_of(model.config, tokenizer)
    if model.config.is_encoder_decoder and recipe.task == "embed":
        model = model.get_encoder()
    model = model.to(device).eval()
    head = head_of(recipe, model.config, device)
    if device.type == "cpu":
        cores.fit(model)
    return Pooler(model, head, pad_id, "token_type_ids" in tokenizer.model_input_names)


def facts_of(
    config: EngineConfig, recipe: PoolingRecipe, pooler: Pooler, stored: CheckpointFacts, context: int
) -> ModelFacts:
    """What the server is told of a model that was measured. ``context``: the longest input, as its files say. Raises
    what the model does with a short input.
    """
    model, head = pooler.model, pooler.head
    width = pooler.run([PoolInput(pack_ids([*PROBE]))]).shape[1]
    if context <= TRIED:
        context = longest_run(pooler, context)
    pooling = PoolingFacts(
        width,
        () if head.pooling is None else head.pooling.modes,
        head.normalises,
        pooler.shares,
        dict(recipe.prompts),
        recipe.default_prompt,
        min(recipe.dimensions or 0, width),
    )
    return ModelFacts(
        architecture=type(model).__name__,
        parameters=stored.parameters,
        weight_bytes=stored.nbytes,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        vocab_size=model.get_input_embeddings().num_embeddings,
        max_context=min(config.max_context or context, context),
        eos_token_ids=(),
        mode=pooler.mode,
        probe="",
        layer_kinds={},
        kv_bytes_per_token=0,
        page_size=1,
        pages=0,
        fingerprint=hashlib.blake2b(f"{stored.digest} {pooling!r}".encode(), digest_size=16).hexdigest(),
        own_context=context,
        licence=licence_of(config.model),
        task=recipe.task,
        pooling=pooling,
    )


def read_stored(
    config: EngineConfig, settings: Any, recipe: PoolingRecipe, device: torch.device
) -> tuple[Any, list[str], str]:
    """The model, whose weights stay packed if they are in a GGUF file, the names of those that are not there, and a
    digest.
    """
    if (path := find_file(config.model)) is None:
        model, lacking = read_weights(config, settings, recipe)
        return model, lacking, digest(model)
    settings.use_cache = False
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    model, found = gguf.read_model(path, settings, AutoModel, dtype, {}, device)
    return model, [], found


def keep(model: Any, device: torch.device) -> Packing:
    """Have the weights that a file has packed multiplied as they are, on a CPU."""
    packing = Packing({})
    if device.type == "cpu":
        pack_experts(model, packing)
        keep_packed(model, packing)
        packing.choose_ways()
    return packing


def read_weights(config: EngineConfig, settings: Any, recipe: PoolingRecipe) -> tuple[Any, list[str]]:
    """The model as transformers loads it, and the names of weights that the checkpoint does not have."""
    kind = AutoModel if recipe.task == "embed" else AutoModelForSequenceClassification
    settings.use_cache = False
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    with AllOperators():
        model, info = kind.from_pretrained(config.model, config=settings, dtype=dtype, output_loading_info=True)
    return model, sorted(info["missing_keys"])


def check_lacking(pooler: Pooler, lacking: list[str]) -> None:
    """Weights that are missing must make no difference: many models have a head that is not used. Raises
    ``ValueError``.
    """
    weights = dict(pooler.model.named_parameters())
    missing = [weights[name] for name in lacking if name in weights]
    if not missing:
        return
    one = [PoolInput(pack_ids([*PROBE]))]
    before = pooler.run(one)
    with torch.no_grad():
        for weight in missing:
            weight.add_(1)
    if not torch.equal(before, pooler.run(one)):
        raise ValueError(f"{len(missing)} weights are missing, {lacking[0]} first")


def head_of(recipe: PoolingRecipe, settings: Any, device: torch.device) -> VectorHead:
    """What the recipe puts behind the model. Raises ``BadRecipe``."""
    if recipe.task == "score":
        usual: nn.Module = nn.Sigmoid() if settings.num_labels == 1 else nn.Identity()
        return VectorHead(None, activation=activation(recipe.activation) if recipe.activation else usual)
    first, *others = recipe.modules or (None,)
    if first is None or first.kind != "Pooling":
        raise BadRecipe("its first module behind the model does not pool")
    return VectorHead(PoolingModule(first.options), [vector_module(source, device) for source in others])


def padding_of(settings: Any, tokenizer: Any) -> int:
    """The id that fills shorter inputs up; the model is told of it where it looks for the last token itself."""
    found = next((i for i in (tokenizer.pad_token_id, settings.pad_token_id) if i is not None), None)
    if settings.pad_token_id is None and found is not None:
        settings.pad_token_id = found
    return 0 if found is None else int(found)


def longest_input(recipe: PoolingRecipe, settings: Any, tokenizer: Any) -> int:
    """The most tokens of an input, as sentence-transformers takes it: what its file says, else the smaller of what the
    tokenizer and the model say.
    """
    if recipe.max_tokens is not None:
        return recipe.max_tokens
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None)
    said = [limit for limit in (tokenizer.model_max_length, positions) if isinstance(limit, int) and limit > 0]
    return min((limit for limit in said if limit < LARGE_INTEGER), default=ENDLESS)


def longest_run(pooler: Pooler, said: int) -> int:
    """The longest input up to ``said`` tokens that the model can run: some have fewer positions than they say, as the
    first ones stand for padding. Raises what the model does with a short one.
    """
    works, fails = len(PROBE), said + 1
    while works + 1 < fails:
        tried = said if fails > said else (works + fails) // 2
        try:
            pooler.run([PoolInput(pack_ids([PROBE[0]] * tried))])
            works = tried
        except (IndexError, RuntimeError):
            fails = tried
    return min(works, said)


def lower_case(tokenizer: Any) -> None:
    """Have texts lower-cased before anything else."""
    from tokenizers.normalizers import Lowercase, Normalizer, Sequence

    backend = tokenizer.backend_tokenizer
    own: list[Normalizer] = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = Sequence([Lowercase(), *own])


def warn_of_unused(config: EngineConfig) -> None:
    """Tell of options that models that generate have."""
    given: Mapping[str, bool] = {
        "--weights": config.weights != "auto",
        "--activations": config.activations != "auto",
        "--tensor-parallel": config.tensor_parallel > 1,
        "--adapter": bool(config.adapters),
        "--draft-model": config.draft_model is not None,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        log.warning("%s changes nothing for a model that generates no text", flag)

"""Tiny embedding models and cross-encoders, in folders as sentence-transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import make_tokenizer, of_unit_gain
from tokenizers import processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, LlamaConfig, LlamaModel

WIDTH = 16  # of the hidden states
LONGEST = 48  # tokens of an input
START, END = 257, 258  # what the tokenizer puts around texts
PACKAGE = "sentence_transformers.models"
CHAIN: tuple[tuple[str, Mapping[str, Any]], ...] = (("Pooling", {"pooling_mode": "mean"}), ("Normalize", {}))
TEXTS = ["A cat sat on the mat.", "How far is the moon from here, and why?", "Sun", "ab" * 15]


def pooling_tokenizer() -> Any:
    """Bytes, with a token before and one behind each text, as models of this kind have them."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.model_max_length = LONGEST
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # is saved
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", START), ("<|im_end|>", END)],
    )
    return tokenizer


@cache
def body_of(causal: bool) -> Any:
    """The model that makes hidden states: one that looks both ways, or only back."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 259, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 64}
    model = LlamaModel(LlamaConfig(**sizes)) if causal else BertModel(BertConfig(**sizes, type_vocab_size=2))
    return of_unit_gain(model.eval())


def save_embedder(
    folder: Path,
    chain: Sequence[tuple[str, Mapping[str, Any]]] = CHAIN,
    *,
    causal: bool = False,
    said: Mapping[str, Any] | None = None,
    body: Mapping[str, Any] | None = None,
) -> Path:
    """An embedding model with these modules behind it, in a new folder. ``said``: its
    config_sentence_transformers.json; ``body``: its sentence_bert_config.json.
    """
    folder.mkdir(parents=True)
    body_of(causal).save_pretrained(folder)
    pooling_tokenizer().save_pretrained(folder)
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{PACKAGE}.Transformer"}]
    for number, (kind, options) in enumerate(chain, 1):
        place = f"{number}_{kind}"
        modules.append({"idx": number, "name": str(number), "path": place, "type": f"{PACKAGE}.{kind}"})
        (folder / place).mkdir()
        whole = {"word_embedding_dimension": WIDTH, **options} if kind == "Pooling" else options
        (folder / place / "config.json").write_text(json.dumps(whole))
        if kind == "Dense":
            generator = torch.Generator().manual_seed(number)
            size = options["out_features"], options["in_features"]
            weights = {"linear.weight": torch.randn(size, generator=generator)}
            if options.get("bias", True):
                weights["linear.bias"] = torch.randn(size[:1], generator=generator)
            save_file(weights, folder / place / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said or {}))
    (folder / "sentence_bert_config.json").write_text(json.dumps(body or {}))
    return folder


def save_cross_encoder(folder: Path, labels: int = 1, **settings: Any) -> Path:
    """A cross-encoder in a new folder; ``settings`` of its config."""
    torch.manual_seed(4)
    config = BertConfig(
        vocab_size=259,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        type_vocab_size=2,
        num_labels=labels,
        **settings,
    )
    of_unit_gain(BertForSequenceClassification(config).eval()).save_pretrained(folder)
    pooling_tokenizer().save_pretrained(folder)
    return folder


@torch.inference_mode()
def hidden_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """The hidden states ``[T, H]`` of one input, from scratch and alone: the oracle."""
    found: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
    return found

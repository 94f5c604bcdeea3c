"""A model that is small enough for 100,000 tokens of a session on a CPU, with a tokenizer of some thousand words."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).with_name("templates")
CONTEXT = 262_144
WORDS = 8192
SPLIT = (  # as most models of today have it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ENDS = {"chatml": "<|im_end|>", "reasoning": "<|im_end|>", "headers": "<|eot_id|>", "brackets": "</s>"}
KEEPING = "keeping"  # the template "reasoning" with a variable that keeps the reasoning of older replies
SWITCH = ("loop.index0 > ns.last_query", "preserve_thinking or loop.index0 > ns.last_query")
ENDS[KEEPING] = ENDS["reasoning"]
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
MARKS += ["<|end_header_id|>", "<|eot_id|>", "<s>", "</s>"]
FORMS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
BRACKETS = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"]
BRACKETS += ["[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]


def save_tiny_llama(folder: Path, template: str) -> Path:
    """A folder that ``warmturn serve`` can load, with one of ``templates``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    tokenizer = _train(template)
    config.eos_token_id = tokenizer.convert_tokens_to_ids(ENDS[template])
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _train(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE over this repository's own pages and code."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS - len(MARKS + FORMS + BRACKETS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("server/**/*.py")])
    backend.train_from_iterator((page.read_text(encoding="utf-8") for page in pages), trainer)
    backend.add_special_tokens([*MARKS, *BRACKETS])
    backend.add_tokens(FORMS)
    bos = {"headers": "<|begin_of_text|>", "brackets": "<s>"}.get(template)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=ENDS[template], bos_token=bos, model_max_length=CONTEXT
    )
    tokenizer.chat_template = template_text(template)
    return tokenizer


def template_text(template: str) -> str:
    """The source of one of the templates."""
    source = (TEMPLATES / f"{'reasoning' if template == KEEPING else template}.jinja").read_text().removesuffix("\n")
    return source.replace(*SWITCH) if template == KEEPING else source

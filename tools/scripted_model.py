"""A model that says what a script tells, for benchmarks: of gpt2's shape, with weights made for the script.

12 layers, 12 heads, hidden size 768, vocabulary 50,304, context 8,192, bfloat16: what a step costs depends on these
alone. The layers have random weights, and add little to what the embedding of a token's position is. The last product
is fitted to say, at each position of the script, the token that it tells; elsewhere the model talks nonsense.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

DEMO = Path(__file__).parent.parent / "server" / "demo"
CONTEXT = 8192
_VOCABULARY, _LEARNT = 50304, 16384
_SOURCES = 150  # files of Python's library from which the tokenizer is made
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QUIET = 0.05  # of the size of a position's embedding: of a token's, and of what the layers add
_STEPS, _RATE, _NOISE = 120, 0.03, 0.1
_LOUD = 12.0  # a logit's lead


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE of Python's own library, as gpt2's, with the demo model's chat template; saved to ``folder``."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_SOURCES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in _SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_LEARNT, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(file) for file in files], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0])
    made.save_pretrained(folder)
    shutil.copyfile(DEMO / "chat_template.jinja", folder / "chat_template.jinja")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_model(folder: Path, script: Mapping[int, int]) -> None:
    """Write the model to ``folder``. ``script``: behind the token at a position it says that token. Raises ValueError
    where the script cannot be fitted.
    """
    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(1234)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wpe.weight.normal_()
        model.transformer.wte.weight.normal_(std=_QUIET)
        for block in model.transformer.h:
            block.attn.c_proj.weight.mul_(_QUIET)
            block.mlp.c_proj.weight.mul_(_QUIET)
        model.lm_head.weight.zero_()
        places, tokens = torch.tensor(list(script)), torch.tensor(list(script.values()))
        said, labels = torch.unique(tokens, return_inverse=True)
        hidden = torch.nn.functional.layer_norm(model.transformer.wpe.weight[places], (config.n_embd,))
        model.lm_head.weight[said] = fit(hidden, labels, len(said))
    model.to(torch.bfloat16).save_pretrained(folder)


def fit(hidden: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """Rows ``[count, H]`` with which row ``labels[i]`` has the largest product with ``hidden[i]``, and one above 0:
    softmax regression, under noise. Raises ValueError where some are not.
    """
    rows = torch.zeros(count, hidden.shape[1], requires_grad=True)
    optimiser = torch.optim.Adam([rows], lr=_RATE)
    draw = torch.Generator().manual_seed(5)
    with torch.enable_grad():
        for _ in range(_STEPS):
            noise = torch.randn(hidden.shape, generator=draw) * _NOISE
            logits = (hidden + noise) @ rows.T
            loss = torch.nn.functional.cross_entropy(torch.nn.functional.pad(logits, (0, 1)), labels)  # and 0: the rest
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    found = rows.detach()
    logits = hidden @ found.T
    leads = logits.gather(1, labels[:, None])[:, 0] - logits.scatter(1, labels[:, None], 0.0).max(1).values.clamp_min(0)
    if leads.min() <= 0:
        raise ValueError(f"{int((leads <= 0).sum())} of {len(labels)} places of the script could not be fitted")
    return found * (_LOUD / leads.min())

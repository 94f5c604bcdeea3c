"""Which tokens of a GGUF file end a reply: those that its metadata names, and those that its vocabulary has for that
purpose, as llama.cpp finds them by their text (src/llama-vocab.cpp).
"""

from __future__ import annotations

from scheduler.weights.gguf_file import GgufFile

_NAMED = ("eos_token_id", "eot_token_id", "eom_token_id")
_WORDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
_OF_ARCHITECTURE = dict.fromkeys(("chatglm", "glm4", "glm4moe"), ("<|observation|>",))  # the end of a tool call
_INSIDE = {"<|end|>": "<|return|>"}  # where there is the second, the first ends a part of a reply


def read_ends(file: GgufFile) -> list[int]:
    """The ids of the tokens that end a reply."""
    named = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _NAMED]
    words = file.metadata.get("tokenizer.ggml.tokens")
    wanted = (*_WORDS, *_OF_ARCHITECTURE.get(file.architecture, ()))
    there = {word: number for number, word in enumerate(words) if word in wanted} if isinstance(words, list) else {}
    found = [there[word] for word in wanted if word in there and _INSIDE.get(word) not in there]
    return list(dict.fromkeys([*(number for number in named if isinstance(number, int)), *found]))

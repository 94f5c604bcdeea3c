"""The bundled model remembers through its KV cache alone, which makes it the oracle of every end-to-end test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

DEMO = Path(__file__).parents[2] / "server" / "demo"
CASES = [
    ("My name is Walter.", "Add milk to my shopping list.", "What is my name?", "Walter"),
    ("My secret code is 4821.", "Hello!", "What is my secret code?", "4821"),
    ("I live in Lisbon.", "My name is Alice.", "Where do I live?", "Lisbon"),
    ("My lucky number is 73.", "Thanks!", "What is my lucky number?", "73"),
    ("Add eggs to my shopping list.", "Add honey to my shopping list.", "What is on my shopping list?", "eggs, honey"),
]
Message = dict[str, str]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


def render(tokenizer: Any, messages: list[Message], answer_next: bool = True) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next))


class Chat:
    """A chat whose cache holds every token fed, in order; each turn feeds what the cache does not hold yet."""

    def __init__(self, model: Any, tokenizer: Any, system: str | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.text = ""
        self.pending: list[int] = []
        self.cache = DynamicCache()

    @torch.no_grad()
    def say(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        prompt = render(self.tokenizer, self.messages)
        assert prompt.startswith(self.text), "the template is not prefix-stable"
        new = self.pending + self.tokenizer(prompt[len(self.text) :], add_special_tokens=False).input_ids
        held = self.cache.get_seq_length()
        answer: list[int] = []
        end = self.tokenizer.eos_token_id
        fed = new
        while not answer or (answer[-1] != end and len(answer) < 48):
            logits = self.model(torch.tensor([fed]), past_key_values=self.cache, use_cache=True).logits
            answer.append(int(logits[0, -1].argmax()))
            fed = answer[-1:]
        assert self.cache.get_seq_length() == held + len(new) + len(answer) - 1
        self.pending = answer[-1:]
        reply = str(self.tokenizer.decode(answer, skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": reply})
        self.text = prompt + str(self.tokenizer.decode(answer))
        return reply

    def drop_kv(self) -> None:
        """Lose all that was fed; the next turn feeds only its own message."""
        self.cache, self.pending = DynamicCache(), []


@pytest.mark.parametrize(("first", "second", "question", "fact"), CASES)
def test_the_third_turn_recalls_the_first(
    model: Any, tokenizer: Any, first: str, second: str, question: str, fact: str
) -> None:
    chat = Chat(model, tokenizer)
    chat.say(first)
    chat.say(second)
    assert fact in chat.say(question)


@pytest.mark.parametrize(("first", "second", "question", "fact"), CASES)
def test_without_the_kv_nothing_is_recalled(
    model: Any, tokenizer: Any, first: str, second: str, question: str, fact: str
) -> None:
    chat = Chat(model, tokenizer)
    chat.say(first)
    chat.say(second)
    chat.drop_kv()
    assert fact not in chat.say(question)


def test_a_system_message_does_not_derail_it(model: Any, tokenizer: Any) -> None:
    chat = Chat(model, tokenizer, system="You are a helpful assistant.")
    chat.say("My name is Walter.")
    chat.say("My secret code is 4821.")
    assert "Walter" in chat.say("What is my name?")
    assert "4821" in chat.say("What is the code?")


def test_what_was_never_told_is_not_made_up(model: Any, tokenizer: Any) -> None:
    chat = Chat(model, tokenizer)
    chat.say("My name is Walter.")
    assert "not told" in chat.say("Where do I live?")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_template_only_appends(tokenizer: Any, role: str) -> None:
    """Rendering a longer chat starts with the shorter one's prompt, the answer and the end token."""
    short = [{"role": role, "content": "Answer briefly."}, {"role": "user", "content": "Hello!"}]
    longer = [*short, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Thanks!"}]
    prompt = render(tokenizer, short)
    assert prompt.startswith(f"<|im_start|>{role}\nAnswer briefly.<|im_end|>\n<|im_start|>user\nHello!")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert render(tokenizer, longer).startswith(prompt + "Hi." + tokenizer.eos_token)
    assert render(tokenizer, short, answer_next=False) == prompt.removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize("text", ["Grüße, 世界! 🙂", "a\tb\n\n  c", "1234567 3.14", "x" * 100, "it 's , fine ."])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_it_answers_greedily_and_stops_at_the_end_of_the_message(model: Any, tokenizer: Any) -> None:
    assert model.generation_config.do_sample is False
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_it_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in DEMO.iterdir()) < 3 * 2**20

"""POST /v1/completions: forms of prompts, echo, log-probabilities, order of choices."""

from typing import Any

import pytest
from fake_engine import FACTS
from http_context import Site, demo_tokens, events, reply_ids, served
from msgspec.structs import replace
from transformers import AutoTokenizer

from scheduler.protocol import Delta, Submit, TokenLogprob, unpack_ids
from server.chat.chat_tokenizer import ChatTokenizer
from server.engine.mailbox import Mailbox
from server.schemas.vendor_fields import TokenOptions
from server.turns.completion_reply import LogprobColumns, alternatives


def prompts_of(site: Site) -> list[list[int]]:
    return [list(unpack_ids(submit.prompt)) for submit in site.engine.submitted]


@served()
async def test_body_has_the_shape_of_openai(site: Site) -> None:
    body = (await site.complete(prompt="Once", max_tokens=20)).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello there, friend.", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["completion_tokens"] == len(reply_ids()) + 1


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Once", ["Once"]),
        (["Once", "upon"], ["Once", "upon"]),
        (demo_tokens().encode("Once", special=False), ["Once"]),
        ([demo_tokens().encode("Once", special=False), demo_tokens().encode("upon", special=False)], ["Once", "upon"]),
    ],
)
@served()
async def test_every_form_of_prompt(site: Site, prompt: Any, texts: list[str]) -> None:
    body = (await site.complete(prompt=prompt)).json()
    assert prompts_of(site) == [demo_tokens().encode(text, special=True) for text in texts]
    assert [c["index"] for c in body["choices"]] == list(range(len(texts)))


@served()
async def test_choices_come_prompt_by_prompt_and_each_prompt_counts_once(site: Site) -> None:
    body = (await site.complete(prompt=["a", "bb"], n=2, best_of=2, echo=True, seed=1)).json()
    assert [c["text"][0] for c in body["choices"]] == ["a", "a", "b", "b"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [s.sampling.seed for s in site.engine.submitted] == [1, 2, 1, 2]
    assert body["usage"]["prompt_tokens"] == len(prompts_of(site)[0]) + len(prompts_of(site)[2])
    assert body["usage"]["completion_tokens"] == 4 * (len(reply_ids()) + 1)


@served()
async def test_echo_comes_first_in_body_and_stream(site: Site) -> None:
    assert (await site.complete(echo=True)).json()["choices"][0]["text"] == "OnceHello there, friend."
    chunks = events((await site.complete(echo=True, stream=True)).text)[:-1]
    assert chunks[0]["choices"][0]["text"] == "Once"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "OnceHello there, friend."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@served()
async def test_echo_of_token_ids_is_their_text(site: Site) -> None:
    ids = demo_tokens().encode("Once upon", special=False)
    assert (await site.complete(prompt=ids, echo=True)).json()["choices"][0]["text"].startswith("Once upon")


@served()
async def test_max_tokens_0_with_echo_scores_the_prompt(site: Site) -> None:
    body = (await site.complete(prompt="Once upon", echo=True, max_tokens=0, logprobs=1)).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon", "length")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0
    assert (site.engine.submitted[0].prompt_logprobs, site.engine.submitted[0].stopping.max_tokens) == (1, 0)


@pytest.mark.parametrize("echo", [False, True])
@served()
async def test_logprob_lists_are_parallel_and_offsets_point_into_the_text(site: Site, echo: bool) -> None:
    choice = (await site.complete(prompt="Once", echo=echo, logprobs=2)).json()["choices"][0]
    columns = choice["logprobs"]
    lengths = {len(columns[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert len(lengths) == 1
    for token, offset in list(zip(columns["tokens"], columns["text_offset"], strict=True))[:-1]:
        assert choice["text"].startswith(token, offset)
    assert columns["tokens"][-1] == "<|im_end|>"  # the token that ended it has a probability, and no text
    assert columns["text_offset"][-1] == len(choice["text"])
    assert columns["top_logprobs"][-1]["<|im_end|>"] == -0.5
    assert len(columns["top_logprobs"][-1]) == 2
    assert site.engine.submitted[0].prompt_logprobs == (2 if echo else None)


@served()
async def test_logprobs_0_tells_of_the_drawn_token_only(site: Site) -> None:
    columns = (await site.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert columns["top_logprobs"][0] == {"Hello": -0.5}
    assert site.engine.submitted[0].logprobs == 0


@served()
async def test_streamed_logprobs_add_up_to_those_of_the_body(site: Site) -> None:
    whole = (await site.complete(echo=True, logprobs=2)).json()["choices"][0]["logprobs"]
    chunks = events((await site.complete(echo=True, logprobs=2, stream=True)).text)[:-1]
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name, values in whole.items():
        assert [value for part in parts for value in part[name]] == values


@served()
async def test_without_max_tokens_openais_16_hold_and_fit_a_nearly_full_context(site: Site) -> None:
    await site.complete()
    await site.complete(prompt=[5] * 2040)
    assert [s.stopping.max_tokens for s in site.engine.submitted] == [16, 8]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1024]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"messages": []}, "messages"),
    ],
)
@served()
async def test_wrong_requests_are_named(site: Site, body: dict[str, Any], param: str) -> None:
    response = await site.complete(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not site.engine.submitted


def entry(raw: bytes, logprob: float | None = -1.0) -> TokenLogprob:
    return TokenLogprob(5, raw.decode(errors="replace"), raw, logprob)


def test_offsets_count_characters_not_bytes_or_tokens() -> None:
    columns = LogprobColumns("", 0)
    lists = columns.take((), (entry(b"a"), entry(b"\xc3"), entry(b"\xa9"), entry(b"z")))
    assert lists.text_offset == [0, 1, 1, 2]


def test_prompt_tokens_that_are_not_in_the_text_take_no_room() -> None:
    columns = LogprobColumns("hi", 0)
    assert columns.take((entry(b"<s>", None), entry(b"hi")), (entry(b"!"),)).text_offset == [0, 0, 2]


def test_a_sessions_past_is_skipped_across_deltas() -> None:
    columns = LogprobColumns("c", 2)
    assert columns.take((entry(b"a", None),), ()).tokens == []
    assert columns.take((entry(b"b"), entry(b"c")), ()).tokens == ["c"]


def test_impossible_tokens_have_a_number_and_the_drawn_token_is_always_there() -> None:
    drawn = TokenLogprob(1, "a", b"a", -2.0, ((2, "b", b"b", -0.1), (3, "c", b"c", float("-inf"))))
    assert alternatives(drawn, TokenOptions(logprobs=2)) == {"b": -0.1, "c": -9999.0, "a": -2.0}


@served()
async def test_the_best_of_several_choices_are_told(site: Site) -> None:
    """The fake engine's log-probabilities are all alike, so each choice gets its own here."""
    likely = iter([-3.0, -1.0, -2.0, -1.5, -0.5, -4.0])
    deltas = site.engine._deltas

    def ranked(request: Submit, turn: Mailbox) -> list[Delta]:
        value = next(likely)
        made = deltas(request, turn)
        return [
            replace(d, text=d.text and f"{value}", logprobs=tuple(replace(e, logprob=value) for e in d.logprobs))
            if number == 0
            else replace(d, text="", logprobs=())
            for number, d in enumerate(made)
        ]

    site.engine._deltas = ranked  # type: ignore[method-assign]
    body = (await site.complete(prompt=["A", "B"], n=2, best_of=3)).json()
    assert [choice["text"] for choice in body["choices"]] == ["-1.0", "-2.0", "-0.5", "-1.5"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert len(site.engine.submitted) == 6
    assert body["usage"]["completion_tokens"] == 6 * (len(reply_ids()) + 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 100, "best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"suffix": "x", "echo": True}, "suffix"),
        ({"suffix": "x", "session_id": "s"}, "suffix"),
    ],
)
@served()
async def test_best_of_and_suffix_are_refused_where_they_mean_nothing(
    site: Site, body: dict[str, Any], param: str
) -> None:
    response = await site.complete(**body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def filling() -> ChatTokenizer:
    tokenizer = AutoTokenizer.from_pretrained(demo_tokens()._tokenizer.name_or_path)
    tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], special_tokens=True)
    return ChatTokenizer(tokenizer)


@served(tokens=filling)
async def test_a_gap_is_filled_where_the_tokenizer_has_tokens_for_that(site: Site) -> None:
    given = demo_tokens().encode("Once", special=False)
    for prompt in ("Once", given):
        site.engine.facts = replace(FACTS, vocab_size=2048)
        await site.complete(prompt=prompt, suffix="the end")
        text = filling().decode(unpack_ids(site.engine.submitted[-1].prompt))
        assert text.replace(" ", "") == "<|fim_prefix|>Once<|fim_suffix|>theend<|fim_middle|>"

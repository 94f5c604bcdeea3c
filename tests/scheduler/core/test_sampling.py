"""Sampling against the definitions, written out in plain Python."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import make_tokenizer

from scheduler.core import truncation
from scheduler.core.sampling import Sampler, SamplerOutput
from scheduler.core.text import TextStream, Vocabulary
from scheduler.core.truncation import min_probabilities, min_probability, truncate
from scheduler.core.turn import Turn
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping

END = 9
WIDTH = 12
_vocabulary = Vocabulary(make_tokenizer())


def turn_of(
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    prompt: tuple[int, ...] = (0,),
    logprobs: int | None = None,
) -> Turn:
    request = Submit(
        "t", "a", pack_ids(list(prompt)), None, sampling or Sampling(), stopping or Stopping(), logprobs=logprobs
    )
    return Turn(request, TextStream(_vocabulary, ()))


def logits_of(seed: int = 1, rows: int = 1, spread: float = 2.0) -> torch.Tensor:
    """Random logits ``[rows, WIDTH]``."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * spread


def draws(logits: torch.Tensor, sampling: Sampling, count: int) -> Counter[int]:
    """How often each token is drawn from one row of logits."""
    sampler = Sampler((END,))
    batch = 500
    out: Counter[int] = Counter()
    for start in range(0, count, batch):
        turns = [turn_of(Sampling(**{**options(sampling), "seed": start + i})) for i in range(batch)]
        out.update(item.token for item in sampler.draw(logits.expand(batch, -1), turns).read())
    return out


def options(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def softmax(logits: list[float]) -> list[float]:
    """In float64."""
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def wanted(logits: list[float], sampling: Sampling) -> list[float]:
    """The distribution that the parameters define: temperature, top-k, nucleus of what is left, min-p."""
    probs = softmax([x / sampling.temperature for x in logits])
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass = sum(probs[i] for i in kept)
    nucleus: list[int] = []
    reached = 0.0
    for i in kept:
        if nucleus and reached >= sampling.top_p:
            break
        nucleus.append(i)
        reached += probs[i] / mass
    final = [i for i in nucleus if probs[i] >= sampling.min_p * probs[order[0]]]
    total = sum(probs[i] for i in final)
    return [probs[i] / total if i in final else 0.0 for i in range(len(probs))]


PARAMETERS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=1.7),
    Sampling(top_k=1),
    Sampling(top_k=4),
    Sampling(top_k=100),
    Sampling(top_p=0.8),
    Sampling(top_p=0.3),
    Sampling(top_p=1e-9),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=0.0)], ids=str)
def test_of_equals_the_first_is_the_likeliest(sampling: Sampling) -> None:
    logits = logits_of()
    logits[0, [3, 7]] = 30.0
    assert draws(logits, sampling, 500) == {3: 500}


def test_tokens_that_have_no_logit_are_no_trouble() -> None:
    """Some models embed more tokens than they say."""
    turn = turn_of(Sampling(temperature=0.0, repetition_penalty=1.5), prompt=(1, WIDTH + 4))
    assert Sampler((END,)).draw(logits_of(), [turn]).read()[0].usable


@pytest.mark.parametrize("sampling", PARAMETERS, ids=str)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """Chi-square over 10,000 draws of fixed seeds; the bound is met by a right sampler in all but 1 of 10^5 cases."""
    logits = logits_of()
    want = wanted(logits[0].tolist(), sampling)
    count = 10_000 if max(want) < 1 else 500
    got = draws(logits, sampling, count)
    assert all(want[token] > 0 for token in got)
    likely = [i for i, p in enumerate(want) if p * count >= 5]
    chi = sum((got[i] - want[i] * count) ** 2 / (want[i] * count) for i in likely)
    assert chi < len(likely) + 6 * math.sqrt(2 * len(likely)) + 12
    if len(likely) > 1:
        assert len(got) > 1


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("width", [1, 2, 300, 20_011])
def test_what_is_cut_off_is_the_same_on_any_device(width: int, spread: float) -> None:
    """By the definition, in float64: what a CPU sorts and what a GPU does."""
    rng = random.Random(width)
    logits = (
        torch.randn(40, width, generator=torch.Generator().manual_seed(3)) * spread * 4
    ).round() / 4  # with equals
    probs = torch.softmax(logits, -1)
    asked = [
        Sampling(
            top_k=rng.choice([0, 0, 1, 7, 40, width, 2 * width]),
            top_p=rng.choice([1.0, 0.95, 0.5, 1e-6, 0.999]),
            min_p=rng.choice([0.0, 0.0, 0.02, 1.0]),
        )
        for _ in probs
    ]
    there = min_probabilities(probs, asked)[:, 0].tolist()
    cut = truncate(probs, asked)
    for row, sampling in enumerate(asked):
        least = min_probability(probs[row].numpy(), sampling)
        ordered = sorted(probs[row].tolist(), reverse=True)[: sampling.top_k or width]
        whole, before, kept = math.fsum(ordered), 0.0, 0
        while kept < len(ordered) and (kept == 0 or sampling.top_p == 1.0 or before < sampling.top_p * whole):
            before += ordered[kept]
            kept += 1
        edges = [before, before - ordered[kept - 1]]  # sums of many numbers are not the same to the last bit
        sure = sampling.top_p == 1.0 or all(abs(edge - sampling.top_p * whole) > 1e-6 * whole for edge in edges)
        kept = sum(p >= sampling.min_p * ordered[0] * (1 - 1e-6) for p in ordered[:kept])
        for bound in (least, there[row]):
            smallest = min(p for p in ordered if p >= bound * (1 - 1e-6))
            assert smallest in ([ordered[kept - 1]] if sure else ordered[max(0, kept - 2) : kept + 1])
        assert torch.equal(cut[row] > 0, (probs[row] >= least) & (probs[row] > 0))


def test_a_gpu_does_not_sort_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def find(self, probs: torch.Tensor, *wanted: torch.Tensor) -> torch.Tensor:
            return torch.full((len(probs), 1), 0.25)

    def sort(*args: object, **options: object) -> None:
        raise AssertionError

    monkeypatch.setattr(truncation, "truncation_kernel", lambda device: Kernel())
    monkeypatch.setattr(torch.Tensor, "sort", sort)
    probs = torch.softmax(logits_of(1, 2), -1)
    assert min_probabilities(probs, [Sampling(top_p=0.5), Sampling(top_k=3)]).tolist() == [[0.25], [0.25]]
    least = min_probabilities(probs, [Sampling(min_p=0.5), Sampling()])
    assert torch.equal(least, torch.stack([probs[0].max() / 2, torch.tensor(0.0)])[:, None])


def test_the_support_is_exactly_the_definition_for_mixed_rows() -> None:
    """Every row of one batch by its own parameters: no token outside of its support, every likely one inside."""
    rng = random.Random(4)
    sampler = Sampler((END,))
    logits = logits_of(5, len(PARAMETERS))
    seen: list[set[int]] = [set() for _ in PARAMETERS]
    for _ in range(400):
        turns = [turn_of(Sampling(**{**options(p), "seed": rng.randrange(2**31)})) for p in PARAMETERS]
        for row, item in enumerate(sampler.draw(logits, turns).read()):
            seen[row].add(item.token)
    for row, parameters in enumerate(PARAMETERS):
        want = wanted(logits[row].tolist(), parameters)
        assert seen[row] <= {i for i, p in enumerate(want) if p > 0}
        assert seen[row] >= {i for i, p in enumerate(want) if p > 0.05}


class Fixed(random.Random):
    """A generator that gives one number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize("number", [0.0, 0.3, 0.999999, 1 - 2**-53])
def test_no_rounding_picks_a_token_of_no_probability(number: float) -> None:
    logits = torch.full((1, WIDTH), -200.0)
    logits[0, 3] = 0
    logits[0, 7] = 0
    turn = turn_of()
    turn.random = Fixed(number)
    assert Sampler((END,)).draw(logits, [turn]).read()[0].token == (3 if number < 0.5 else 7)


def test_a_neighbour_thattruncates_takes_nothing_from_a_row_that_does_not() -> None:
    """Rare tokens beyond the precision of a float32 sum stay possible."""
    logits = torch.full((2, WIDTH), -19.0)
    logits[:, 2] = 0
    tokens = []
    for company in (False, True):
        turn = turn_of()
        turn.random = Fixed(1 - 1e-9)
        turns = [turn, turn_of(Sampling(top_k=1))] if company else [turn]
        tokens.append(Sampler((END,)).draw(logits[: len(turns)], turns).read()[0].token)
    assert tokens == [WIDTH - 1, WIDTH - 1]


# -- penalties and biases -------------------------------------------------------------------------------------------


def penalised(logits: list[float], sampling: Sampling, prompt: tuple[int, ...], made: list[int]) -> list[float]:
    """Keskar's repetition penalty on all tokens met, then OpenAI's two on generated ones, then the bias."""
    out = list(logits)
    counts = Counter(made)
    for token in range(len(out)):
        if token in counts or token in prompt:
            x = out[token]
            out[token] = x / sampling.repetition_penalty if x > 0 else x * sampling.repetition_penalty
        out[token] -= sampling.frequency_penalty * counts[token]
        out[token] -= sampling.presence_penalty if counts[token] else 0.0
        out[token] += sampling.logit_bias.get(token, 0.0)
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=1.5),
        Sampling(frequency_penalty=0.7),
        Sampling(frequency_penalty=-0.02, presence_penalty=-0.5),
        Sampling(repetition_penalty=1.8),
        Sampling(repetition_penalty=0.6),
        Sampling(logit_bias={2: 1.5, 7: -100.0}),
        Sampling(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.3, logit_bias={1: -3.0, 4: 2.0}),
    ],
    ids=str,
)
def test_penalties_and_biases_against_the_formula(sampling: Sampling) -> None:
    """Greedy over 60 steps of changing logits, a plain neighbour before and behind."""
    greedy = Sampling(**{**options(sampling), "temperature": 0.0})
    prompt = (1, 1, 5, 6)
    turn = turn_of(greedy, prompt=prompt)
    plain = Sampling(temperature=0.0)
    sampler = Sampler((END,))
    made: list[int] = []
    for step in range(60):
        logits = logits_of(100 + step, 3, spread=1.0)
        before = logits.clone()
        got = [item.token for item in sampler.draw(logits, [turn_of(plain), turn, turn_of(plain)]).read()]
        want = penalised(logits[1].tolist(), sampling, prompt, made)
        assert got[1] == max(range(WIDTH), key=want.__getitem__)
        assert [got[0], got[2]] == logits[[0, 2]].argmax(-1).tolist()
        assert torch.equal(logits, before)
        made.append(got[1])
        turn.ids.append(got[1])
    assert len(set(made)) > 2


def test_penalties_after_a_preemption_count_what_was_made_before() -> None:
    sampling = Sampling(temperature=0.0, frequency_penalty=1.0)
    turn = turn_of(sampling)
    for token in (3, 3, 3, 4):
        turn.ids.append(token)
    logits = torch.zeros(1, WIDTH)
    logits[0, 3], logits[0, 4], logits[0, 5] = 3.4, 1.2, 0.3
    assert Sampler((END,)).draw(logits, [turn]).read()[0].token == 3  # 0.4 against 0.2 and 0.3


# -- ends -----------------------------------------------------------------------------------------------------------


def test_before_min_tokens_nothing_that_ends_the_turn_is_drawn() -> None:
    turn = turn_of(Sampling(temperature=0.0), Stopping(min_tokens=3, stop_token_ids=(2, 4)))
    logits = torch.zeros(1, WIDTH)
    logits[0, END], logits[0, 2], logits[0, 4], logits[0, 8] = 9, 8, 7, 6
    sampler = Sampler((END,))
    tokens = []
    for _ in range(4):
        tokens.append(sampler.draw(logits, [turn]).read()[0].token)
        turn.ids.append(tokens[-1])
    assert tokens == [8, 8, 8, END]


def test_an_end_that_is_ignored_may_come_before_min_tokens() -> None:
    turn = turn_of(Sampling(temperature=0.0), Stopping(min_tokens=3, ignore_eos=True, stop_token_ids=(2,)))
    logits = torch.zeros(1, WIDTH)
    logits[0, END], logits[0, 2] = 8, 9
    assert Sampler((END,)).draw(logits, [turn]).read()[0].token == END


# -- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_the_model_s_own() -> None:
    """Before temperature, penalties and bias; each row as many alternatives as it asked for."""
    shaped = Sampling(temperature=0.0, logit_bias={3: 100.0}, repetition_penalty=2.0)
    turns = [turn_of(shaped, logprobs=4), turn_of(Sampling(temperature=0.0)), turn_of(Sampling(seed=1), logprobs=0)]
    logits = logits_of(8, 3)
    got = Sampler((END,)).draw(logits, turns).read()
    for row in (0, 2):
        probs = softmax(logits[row].tolist())
        order = sorted(range(WIDTH), key=lambda i: -probs[i])
        asked = turns[row].request.logprobs
        assert got[row].logprob == pytest.approx(math.log(probs[got[row].token]), abs=1e-4)
        assert [token for token, _ in got[row].top] == order[:asked]
        assert [value for _, value in got[row].top] == pytest.approx(
            [math.log(probs[i]) for i in order[:asked]], abs=1e-4
        )
    assert got[0].token == 3
    assert (got[1].logprob, got[1].top) == (None, ())
    assert got[2].top == ()


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (got,) = SamplerOutput(logits_of(2), [0], [50]).read()
    assert len(got.top) == WIDTH


# -- seeds and company ----------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_draws_in_any_company() -> None:
    sampler = Sampler((END,))
    wanted_turn = Sampling(seed=11, top_p=0.9)

    def run(company: int) -> list[int]:
        turn = turn_of(wanted_turn)
        tokens = []
        for step in range(30):
            logits = logits_of(step, company + 1)
            logits[0] = logits_of(1000 + step)[0]
            others = [turn_of(Sampling(top_k=i % 3, temperature=(i % 4) / 2, min_p=0.1)) for i in range(company)]
            tokens.append(sampler.draw(logits, [turn, *others]).read()[0].token)
            turn.ids.append(tokens[-1])
        return tokens

    alone = run(0)
    assert run(1) == run(7) == alone
    assert len(set(alone)) > 3


def test_different_seeds_and_no_seed_differ() -> None:
    logits = torch.zeros(1, WIDTH)
    sampler = Sampler((END,))

    def run(seed: int | None) -> list[int]:
        turn = turn_of(Sampling(seed=seed))
        return [sampler.draw(logits, [turn]).read()[0].token for _ in range(30)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(None) != run(None)


def test_greedy_rows_are_untouched_by_their_neighbours() -> None:
    sampler = Sampler((END,))
    for seed in range(30):
        logits = logits_of(seed, 4)
        hot = Sampling(temperature=3.0, top_k=2, presence_penalty=1.0, logit_bias={1: 50.0})
        turns = [turn_of(hot), turn_of(Sampling(temperature=0.0)), turn_of(hot), turn_of(Sampling(temperature=0.0))]
        got = sampler.draw(logits, turns).read()
        assert [got[1].token, got[3].token] == logits[[1, 3]].argmax(-1).tolist()


def test_a_seed_keeps_its_sign() -> None:
    one, other = (turn_of(Sampling(seed=seed)) for seed in (-1, 1))
    assert one.random.random() != other.random.random()


def test_rows_that_hold_no_numbers_are_told_from_others() -> None:
    logits = logits_of(2, rows=4)
    logits[1, 3] = float("nan")
    logits[3, :] = float("inf")
    turns = [turn_of(Sampling(temperature=t), logprobs=n) for t, n in ((0.0, None), (0.0, 2), (1.0, 2), (1.0, None))]
    assert [item.usable for item in Sampler((END,)).draw(logits, turns).read()] == [True, False, True, False]
    greedy = [turn_of(Sampling(temperature=0.0)) for _ in range(4)]
    assert [item.usable for item in Sampler((END,)).draw(logits, greedy).read()] == [True, False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_never_completed(temperature: float) -> None:
    """A word of one token is impossible, one of several is where all of it but the last was generated."""
    logits = torch.zeros(1, WIDTH)
    logits[0, 3], logits[0, 4] = 50.0, 40.0
    sampling = Sampling(temperature=temperature, bad_words=((3,), (5, 6, 4), (7, 4)))
    turn = turn_of(sampling, prompt=(5, 6))
    sampler = Sampler((END,))
    assert [sampler.draw(logits, [turn]).read()[0].token for _ in range(20)] == [4] * 20  # the prompt is no part
    for said in (5, 6):
        turn.ids.append(said)
    assert not {3, 4} & {sampler.draw(logits, [turn]).read()[0].token for _ in range(20)}
    turn.ids.append(8)
    assert sampler.draw(logits, [turn]).read()[0].token == 4
    turn.ids.append(7)
    plain = turn_of(Sampling(temperature=0.0))
    tokens = [item.token for item in sampler.draw(logits.expand(2, -1), [turn, plain]).read()]
    assert tokens[0] not in (3, 4)
    assert tokens[1] == 3
    assert logits[0, 3] == 50.0

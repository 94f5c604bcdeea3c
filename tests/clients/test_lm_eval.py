"""lm-eval over text completions: log-likelihoods of echoed prompts, and generation, on a task of the test's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from conftest import KEY
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from server_process import ServerProcess

COMMON = """
task: ours
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{text}}"
"""
CHOICE = f"""{COMMON}
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
GENERATE = f"""{COMMON}
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: 32, do_sample: false}}
filter_list: [{{name: strip, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match}}]
"""
NAMES = ("Walter", "Emma", "Oliver")
TURN = "<|im_start|>user\nMy name is {0}.<|im_end|>\n<|im_start|>assistant\nNice to meet you,"


def model(server: ServerProcess) -> LocalCompletionsAPI:
    """With the server's own tokenizer."""
    url = f"{server.url}/v1/completions"
    return LocalCompletionsAPI(model="m", base_url=url, tokenizer_backend="remote", auth_token=KEY, max_length=1024)


def run(server: ServerProcess, folder: Path, task: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "task.yaml").write_text(task.replace("DATA", str(folder / "data.jsonl")))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(model=model(server), tasks=["ours"], task_manager=manager, bootstrap_iters=0)
    assert results is not None
    return dict(results["results"]["ours"])


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_log_likelihoods(server: ServerProcess, tmp_path: Path) -> None:
    documents = [{"text": TURN.format(name), "choices": [f" {name}!", " Xyzzy!"]} for name in NAMES]
    assert run(server, tmp_path, CHOICE, documents)["acc,none"] == 1.0


def test_generation(server: ServerProcess, tmp_path: Path) -> None:
    documents = [{"text": TURN.format(name), "answer": f"{name}!"} for name in NAMES]
    assert run(server, tmp_path, GENERATE, documents)["exact_match,strip"] == 1.0


def test_what_it_adds_up_is_what_the_server_told(server: ServerProcess) -> None:
    context, choice = TURN.format("Walter"), " Walter!"
    ((total, greedy),) = model(server).loglikelihood([Instance("loglikelihood", {}, (context, choice), 0)])
    body = {"prompt": context + choice, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = server.post("/v1/completions", body, authorization=f"Bearer {KEY}").json()["choices"][0]["logprobs"]
    told = [p for p, at in zip(answer["token_logprobs"], answer["text_offset"], strict=True) if at >= len(context)]
    assert math.isclose(total, sum(told), rel_tol=1e-3)
    assert greedy

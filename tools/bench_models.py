"""Three models on one port with two loaded, two tenants, turns in random order: ``python -m tools.bench_models``.

The models are the bundled one with other weights, so what is measured is the swap and not the model. Each tenant has a
session for each model and one that goes from model to model. In the middle one engine is killed. Prints a table;
exits with 1 if a request failed, or KV of a session was computed again that was on disk.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from server.cli.bench import bench
from tools.random_model import DEMO
from tools.tables import table

MODELS = ("one", "two", "three")
TENANTS = ("ann", "bob")
TRIES = 5
AWAY = ("engine_died", "engine_unavailable")  # what a client is told while the killed engine is away


@dataclass
class Results:
    """What the turns have cost. ``swaps``: seconds of those that loaded a model; ``resumed``: sessions that went on
    from disk after that.
    """

    swaps: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def make_models(folder: Path) -> None:
    """Write the models: the same tokenizer, weights that differ."""
    for number, name in enumerate(MODELS):
        shutil.copytree(DEMO, folder / name)
        weights = load_file(folder / name / "model.safetensors")
        torch.manual_seed(number)
        changed = {key: value * (1 + 0.02 * torch.randn(()).to(value.dtype)) for key, value in weights.items()}
        save_file(changed, folder / name / "model.safetensors", metadata={"format": "pt"})


class Load:
    """Turns of all tenants against a server at ``url``."""

    def __init__(self, url: str, results: Results) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._results = results
        self._known: set[tuple[str, str]] = set()
        self._last: dict[tuple[str, str], str] = {}  # the model of a session's last turn
        self._swapped: dict[tuple[str, str], bool] = {}  # whether its model was unloaded since

    def loaded(self, tenant: str) -> set[str]:
        data = self._http.get("/v1/models", headers=self._key(tenant)).json()["data"]
        return {model["id"] for model in data if model["status"]["value"] == "loaded"}

    def say(self, tenant: str, model: str, session: str) -> None:
        """One turn, again after a 503 as clients do. What it cost joins the results."""
        results, key = self._results, (tenant, session)
        was_loaded = model in self.loaded(tenant)
        began = time.perf_counter()
        answer = self._post(tenant, model, session)
        seconds = time.perf_counter() - began
        if answer is None:
            return
        (results.plain if was_loaded else results.swaps).append(seconds)
        cache = answer["cache"]
        went_on = key in self._known and self._last[key] == model
        if went_on:
            results.counts["turns that went on with their model"] += 1
            results.counts["of these from disk"] += cache["reused"]["disk"] > 0
            results.counts["tokens recomputed by these"] += cache["recomputed"]
            if not was_loaded:
                results.counts["turns after a swap that went on"] += 1
                results.counts["of these from disk, nothing recomputed"] += (
                    cache["reused"]["disk"] > 0 and cache["recomputed"] == 0
                )
        self._known.add(key)
        self._last[key] = model

    def _post(self, tenant: str, model: str, session: str) -> dict[str, Any] | None:
        body = {"model": model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "Tell me more about the sea and the ships on it."}]
        for _ in range(TRIES):
            path = f"/v1/sessions/{session}/chat/completions"
            answer = self._http.post(path, json=body, headers=self._key(tenant))
            if answer.status_code == 503 and answer.json()["error"]["code"] in AWAY:
                self._results.counts["tries while the killed engine was away"] += 1
                time.sleep(float(answer.headers["retry-after"]))
                continue
            break
        told = answer.json()
        if answer.status_code != 200 or told["model"] != model:
            self._results.failures.append(f"{answer.status_code} {answer.text[:100]}")
            return None
        return dict(told)

    def strangers(self) -> None:
        """No tenant sees another's sessions."""
        for tenant in TENANTS:
            listed = self._http.get("/v1/sessions?limit=100", headers=self._key(tenant)).json()["data"]
            if any(not session["id"].startswith(tenant) for session in listed):
                self._results.failures.append("a tenant sees another's sessions")

    @staticmethod
    def _key(tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer key-of-{tenant}"}


def engines(server: int) -> list[int]:
    """The pids of the engine processes, oldest first; the youngest may be the one that waits for the next model."""
    return sorted(map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split()))


def run(requests: int, seed: int) -> Results:
    """All turns on one server. Two models are loaded when an engine is killed, the oldest."""
    results, chance = Results(), random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        make_models(folder / "models")
        keys = [part for tenant in TENANTS for part in ("--api-key", f"{tenant}=key-of-{tenant}")]
        flags = ["--models", str(folder / "models"), "--max-models", "2", "--data-dir", str(folder / "data"), *keys]
        with bench.started([*flags, "--kv-memory", "64MiB"], os.environ) as (url, pid):
            load = Load(url, results)
            for number in range(requests):
                if number == requests // 2:
                    os.kill(engines(pid)[0], signal.SIGKILL)
                tenant, model = chance.choice(TENANTS), chance.choice(MODELS)
                load.say(tenant, model, f"{tenant}-{model}" if chance.random() < 0.9 else f"{tenant}-wandering")
            load.strangers()
    return results


def report(results: Results, requests: int, wall: float) -> str:
    swaps, plain = sorted(results.swaps), sorted(results.plain)
    rows = [
        ("requests", str(requests)),
        ("failed", str(len(results.failures))),
        ("seconds in all", f"{wall:.0f}"),
        ("turns that waited for a swap", str(len(swaps))),
        ("seconds of these, median", f"{statistics.median(swaps):.2f}"),
        ("seconds of these, most", f"{swaps[-1]:.2f}"),
        ("seconds of the others, median", f"{statistics.median(plain):.3f}"),
        *((name, str(count)) for name, count in results.counts.items()),
    ]
    return table("what | figure", rows)


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.perf_counter()
    results = run(options.requests, options.seed)
    print(report(results, options.requests, time.perf_counter() - began))
    print(*results.failures[:10], sep="\n")
    return bool(results.failures)


if __name__ == "__main__":
    sys.exit(main())

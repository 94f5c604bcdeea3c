"""`--metrics-compat vllm`: the same metrics under vLLM's names, for dashboards and routers that expect these."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cache.tier import Tier
from scheduler.model_facts import ModelFacts
from server.telemetry.metrics import PREFIX, Metrics

SAME = {  # ours, without the prefix -> theirs
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "preemptions": "num_preemptions",
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "generation_tokens",
    "turns": "request_success",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
}
MORE = {  # what they count twice, in tokens
    "prompt_tokens": "prefix_cache_queries",
    "cached_tokens": "prefix_cache_hits",
}
LABELS = {"finish_reason": "finished_reason"}


class VllmNames(Collector):
    """The metrics that vLLM has too, under its names and with its labels ``model_name`` and ``engine``."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model, "engine": "0"}

    def describe(self) -> list[Metric]:
        """Empty: the families are known only when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, with the current values."""
        for family in self._metrics.collect():
            ours = family.name.removeprefix(PREFIX)
            for names in (SAME, MORE):
                if ours in names:
                    yield self._rename(family, f"vllm:{names[ours]}")
            if ours == "kv_cache_usage_ratio":
                yield self._usage(family)
        facts = self._metrics.facts
        if facts is not None:
            yield self._config(facts)

    def _rename(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {LABELS.get(label, label): value for label, value in sample.labels.items()} | self._labels
            renamed.samples.append(Sample(name + sample.name.removeprefix(family.name), labels, sample.value))
        return renamed

    def _usage(self, family: Metric) -> Metric:
        device = next(sample.value for sample in family.samples if sample.labels["tier"] == Tier.DEVICE)
        return self._one("kv_cache_usage_perc", family.documentation, {}, device)

    def _config(self, facts: ModelFacts) -> Metric:
        sizes = {"block_size": str(facts.page_size), "num_gpu_blocks": str(facts.pages)}
        return self._one("cache_config_info", "1; its labels tell how KV is paged", sizes, 1.0)

    def _one(self, name: str, text: str, labels: dict[str, str], value: float) -> Metric:
        labels = labels | self._labels
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

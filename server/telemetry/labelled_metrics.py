"""The metrics of several models as one text, each with the name of its model as a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from server.telemetry.metrics import PREFIX, Metrics

OF_THE_SERVER = tuple(
    PREFIX + name for name in ("requests", "log_salvages", "log_salvaged_sessions", "log_rollbacks")
)  # counts of no model: they are added up
PROCESS = "process_"  # figures of the server process, which all models have
MODEL = ("model", "model_name")  # a sample that has one of these labels tells its model already


def metrics_of(models: Mapping[str, Metrics]) -> bytes:
    """The metrics of models by their names, in Prometheus' text format. Those of one model have no such label."""
    if len(models) == 1:
        return next(iter(models.values())).text()
    return generate_latest(Labelled(models))


class Labelled(Collector):
    """The families of all models, each family once."""

    def __init__(self, models: Mapping[str, Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """All families, with the current values."""
        families: dict[str, Metric] = {}
        for number, (model, metrics) in enumerate(self._models.items()):
            for family in metrics.registry.collect():
                if family.name.startswith(PROCESS) and number:
                    continue
                one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                shared = family.name in OF_THE_SERVER or family.name.startswith(PROCESS)
                one.samples += family.samples if shared else [label(sample, model) for sample in family.samples]
        for family in families.values():
            if family.name in OF_THE_SERVER:
                family.samples = add_up(family.samples)
            yield family


def label(sample: Sample, model: str) -> Sample:
    if any(name in sample.labels for name in MODEL):
        return sample
    return sample._replace(labels={"model": model, **sample.labels})


def add_up(samples: list[Sample]) -> list[Sample]:
    """One sample for each name and set of labels."""
    sums: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
    for sample in samples:
        sums[sample.name, tuple(sample.labels.items())] += sample.value  # type: ignore[assignment]
    return [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]

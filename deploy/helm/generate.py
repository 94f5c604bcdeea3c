"""Writes the chart's templates from the plain manifests: ``python -m deploy.helm.generate``.

The chart is those manifests with values in some places, and a place holds its value as JSON: whoever renders it with
the values that come with it gets the plain manifests again, which a test does. What not every cluster can take is a
template of its own behind a switch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1]
TEMPLATES = DEPLOY / "helm" / "warmturn" / "templates"
_POD = "StatefulSet warmturn spec template spec"
_CLAIM = "StatefulSet warmturn spec volumeClaimTemplates"

PLACES = {  # where in the manifests (kind, name, then keys and indices) -> which value is there
    "StatefulSet warmturn spec replicas": "replicas",
    f"{_POD} terminationGracePeriodSeconds": "gracePeriodSeconds",
    f"{_POD} nodeSelector": "nodeSelector",
    f"{_POD} tolerations": "tolerations",
    f"{_POD} containers 0 image": "image",
    f"{_POD} containers 0 args": "arguments",
    f"{_POD} containers 0 envFrom": "environmentFrom",
    f"{_POD} containers 0 env 0 valueFrom secretKeyRef name": "secret",
    f"{_POD} containers 0 env 2 value": "storage.kv",
    f"{_POD} containers 0 env 4 valueFrom secretKeyRef name": "secret",
    f"{_POD} containers 0 resources": "resources",
    f"{_CLAIM} 0 spec storageClassName": "storage.class",
    f"{_CLAIM} 1 spec storageClassName": "storage.class",
    f"{_CLAIM} 0 spec resources requests storage": "storage.data",
    f"{_CLAIM} 1 spec resources requests storage": "storage.models",
    "ServiceMonitor warmturn metadata labels": "serviceMonitor.labels",
    "ServiceMonitor warmturn spec endpoints 0 interval": "serviceMonitor.interval",
    "ServiceMonitor warmturn spec endpoints 0 authorization credentials name": "secret",
}
SWITCHES = {"servicemonitor.yaml": "serviceMonitor.enabled"}  # template -> the value without which it is empty


def manifests() -> dict[str, list[dict[str, Any]]]:
    """The plain manifests of each template, in the order in which they are applied."""
    base = DEPLOY / "kubernetes" / "base"
    listed = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    files = {"warmturn.yaml": [base / name for name in listed]}
    files["servicemonitor.yaml"] = [DEPLOY / "kubernetes" / "servicemonitor.yaml"]
    return {
        template: [document for path in paths for document in yaml.safe_load_all(path.read_text())]
        for template, paths in files.items()
    }


def templates() -> dict[str, str]:
    """The text of each of the chart's templates, by its file's name."""
    made = manifests()
    documents = {(each["kind"], each["metadata"]["name"]): each for listed in made.values() for each in listed}
    for place, value in PLACES.items():
        kind, name, *keys = place.split()
        _put(documents[kind, name], keys, f"@{value}@")
    return {name: _text(name, listed) for name, listed in made.items()}


def _text(name: str, documents: list[dict[str, Any]]) -> str:
    text = yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    for value in set(PLACES.values()):
        text = text.replace(f"'@{value}@'", f"{{{{ .Values.{value} | toJson }}}}")
    text = f"# Made by `python -m deploy.helm.generate` from deploy/kubernetes.\n{text}"
    if switch := SWITCHES.get(name):
        text = f"{{{{- if .Values.{switch} }}}}\n{text}{{{{- end }}}}\n"
    return text


def _put(document: Any, keys: list[str], value: str) -> None:
    for key in keys[:-1]:
        document = document[int(key) if isinstance(document, list) else key]
    document[keys[-1]] = value


if __name__ == "__main__":
    for file, text in templates().items():
        (TEMPLATES / file).write_text(text)
    sys.exit(0)

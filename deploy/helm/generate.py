"""Writes the chart's template from the plain manifests: ``python -m deploy.helm.generate``.

The chart is those manifests with values in some places, and a place holds its value as JSON: whoever renders it with
the values that come with it gets the plain manifests again, which a test does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1]
TEMPLATE = DEPLOY / "helm" / "warmturn" / "templates" / "warmturn.yaml"
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
}


def manifests() -> list[dict[str, Any]]:
    """The plain manifests, in the order in which they are applied."""
    base = DEPLOY / "kubernetes" / "base"
    listed = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    return [document for name in listed for document in yaml.safe_load_all((base / name).read_text())]


def template() -> str:
    """The text of the chart's only template."""
    documents = manifests()
    for place, value in PLACES.items():
        kind, name, *keys = place.split()
        found = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        _put(found[0], keys, f"@{value}@")
    text = yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    for value in set(PLACES.values()):
        text = text.replace(f"'@{value}@'", f"{{{{ .Values.{value} | toJson }}}}")
    return f"# Made by `python -m deploy.helm.generate` from deploy/kubernetes/base.\n{text}"


def _put(document: Any, keys: list[str], value: str) -> None:
    for key in keys[:-1]:
        document = document[int(key) if isinstance(document, list) else key]
    document[keys[-1]] = value


if __name__ == "__main__":
    TEMPLATE.write_text(template())
    sys.exit(0)

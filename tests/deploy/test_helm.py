"""The chart: the plain manifests, with values in some places."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from deploy_kit import documents

from deploy.helm.generate import PLACES, SWITCHES, TEMPLATES, manifests, templates
from server import __version__

CHART = TEMPLATES.parent
[VALUES] = documents(CHART / "values.yaml")
[ABOUT] = documents(CHART / "Chart.yaml")
SWITCH = re.compile(r"\{\{- if \.Values\.([A-Za-z.]+) \}\}\n")
PLACE = re.compile(r"\{\{ \.Values\.([A-Za-z.]+) \| toJson \}\}")


def value(name: str) -> Any:
    found: Any = VALUES
    for key in name.split("."):
        found = found[key]
    return found


def without_nothing(given: Any) -> Any:
    """Without null, [] and {}, which mean the same as absence."""
    if isinstance(given, dict):
        return {key: without_nothing(each) for key, each in given.items() if each not in (None, [], {})}
    return [without_nothing(each) for each in given] if isinstance(given, list) else given


def written() -> dict[str, str]:
    return {path.name: path.read_text() for path in TEMPLATES.iterdir()}


def rendered(text: str) -> list[Any]:
    """The objects of a template with the chart's own values, switched on where it has a switch."""
    if switch := SWITCH.search(text):
        text = text.replace(switch[0], "").replace("{{- end }}\n", "")
    text = PLACE.sub(lambda found: json.dumps(value(found[1])), text)
    assert "{{" not in text
    return [without_nothing(each) for each in yaml.safe_load_all(text)]


def test_the_templates_are_those_of_the_manifests() -> None:
    assert written() == templates(), "python -m deploy.helm.generate"


def test_with_its_own_values_it_is_the_plain_manifests() -> None:
    for name, plain in manifests().items():
        assert rendered(written()[name]) == [without_nothing(each) for each in plain]


def test_what_not_every_cluster_can_take_is_off() -> None:
    kinds = {name: {each["kind"] for each in plain} for name, plain in manifests().items()}
    assert {name for name, found in kinds.items() if "ServiceMonitor" in found} == set(SWITCHES)
    for name, switch in SWITCHES.items():
        assert value(switch) is False
        text = written()[name]
        assert text.startswith(f"{{{{- if .Values.{switch} }}}}\n")
        assert text.endswith("{{- end }}\n")


def test_every_value_has_its_place() -> None:
    nested = ("storage", "serviceMonitor")
    leaves = {name for name in VALUES if name not in nested}
    leaves |= {f"{name}.{inner}" for name in nested for inner in VALUES[name]}
    placed = {*PLACES.values(), *SWITCHES.values()}
    found = [name for text in written().values() for name in [*PLACE.findall(text), *SWITCH.findall(text)]]
    assert leaves == placed == set(found)


def test_the_chart_has_the_servers_version() -> None:
    assert ABOUT["version"] == ABOUT["appVersion"] == __version__

"""The chart: the plain manifests, with values in some places."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from deploy_kit import documents

from deploy.helm.generate import PLACES, TEMPLATE, manifests, template
from server import __version__

CHART = TEMPLATE.parents[1]
[VALUES] = documents(CHART / "values.yaml")
[ABOUT] = documents(CHART / "Chart.yaml")
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


def test_the_template_is_that_of_the_manifests() -> None:
    assert TEMPLATE.read_text() == template(), "python -m deploy.helm.generate"
    assert [path.name for path in TEMPLATE.parent.iterdir()] == [TEMPLATE.name]


def test_with_its_own_values_it_is_the_plain_manifests() -> None:
    rendered = PLACE.sub(lambda found: json.dumps(value(found[1])), TEMPLATE.read_text())
    assert "{{" not in rendered
    objects = [without_nothing(each) for each in yaml.safe_load_all(rendered)]
    assert objects == [without_nothing(each) for each in manifests()]


def test_every_value_has_its_place() -> None:
    leaves = {name for name, given in VALUES.items() if name != "storage"} | {
        f"storage.{name}" for name in VALUES["storage"]
    }
    assert leaves == set(PLACES.values()) == set(PLACE.findall(TEMPLATE.read_text()))


def test_the_chart_has_the_servers_version() -> None:
    assert ABOUT["version"] == ABOUT["appVersion"] == __version__

"""The manifests: each variant as kustomize makes it, valid, and held against the server that it starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deploy_kit import DEPLOY, GROUP, OTHERS, PORT, SETTINGS, USER, VOLUMES, documents, longest_stop
from http_context import Site, served

from server import __version__
from server.config.command_line import parse
from server.config.serve_options import ServeConfig
from server.middleware.auth import OPEN_PATHS

PAGE = DEPLOY.parent / "docs" / "deploy.md"
MANIFESTS = DEPLOY / "kubernetes"
VARIANTS = sorted(path.parent.name for path in MANIFESTS.glob("*/kustomization.yaml"))
GPU = "nvidia.com/gpu"


@cache
def built(variant: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What is applied, by kind and name."""
    if shutil.which("kubectl") is None:
        if variant != "base":
            pytest.skip("kubectl, which has kustomize, is not installed")
        found = [each for path in (MANIFESTS / "base").glob("*.yaml") for each in documents(path)]
        found = [each for each in found if each["kind"] != "Kustomization"]
    else:
        command = ["kubectl", "kustomize", str(MANIFESTS / variant)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pod(variant: str) -> dict[str, Any]:
    spec: dict[str, Any] = built(variant)["StatefulSet", "warmturn"]["spec"]["template"]["spec"]
    return spec


def container(variant: str) -> dict[str, Any]:
    [only] = pod(variant)["containers"]
    assert isinstance(only, dict)
    return only


def environment(variant: str) -> dict[str, str | None]:
    """Variables and their values; None where the value comes from elsewhere."""
    return {each["name"]: each.get("value") for each in container(variant)["env"]}


def test_there_are_the_variants_of_the_page() -> None:
    assert {f"deploy/kubernetes/{name}" for name in VARIANTS} <= set(PAGE.read_text().split("`"))


def test_the_pages_own_overlay_sets_the_image_and_the_model(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize, is not installed")
    [overlay] = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("<here>", os.path.relpath(DEPLOY.parent, tmp_path)))
    made = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True).stdout
    [only] = [each for each in yaml.safe_load_all(made) if each["kind"] == "StatefulSet"]
    [server] = only["spec"]["template"]["spec"]["containers"]
    assert server["image"] == f"registry.example/warmturn:{__version__}-cuda"
    assert server["args"] == ["serve", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert server["resources"]["limits"][GPU] == "1"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_valid(variant: str) -> None:
    for each in built(variant).values():
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_exists(variant: str) -> None:
    given = environment(variant)
    assert set(given) <= {*SETTINGS, *OTHERS}
    values: dict[str, Any] = {SETTINGS[name]: value for name, value in given.items() if name in SETTINGS and value}
    assert ServeConfig(**values)
    assert isinstance(parse(container(variant)["args"]), ServeConfig)
    assert container(variant)["image"].partition(":")[2].startswith(__version__)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_has_the_time_that_it_takes_to_stop(variant: str) -> None:
    [sleep, seconds] = container(variant)["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    stop = longest_stop(environment(variant).get("WARMTURN_DRAIN_SECONDS"))
    assert int(seconds) + stop < pod(variant)["terminationGracePeriodSeconds"]


def probes(variant: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield name, container(variant)[name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_need_no_key_and_ask_a_port_that_is_there(variant: str) -> None:
    ports = {each["name"]: each["containerPort"] for each in container(variant)["ports"]}
    assert ports == {"http": PORT}
    for _, probe in probes(variant):
        assert probe["httpGet"]["path"] in OPEN_PATHS
        assert probe["httpGet"]["port"] in ports


@served()
async def test_a_pod_takes_no_requests_without_an_engine_and_is_ended_only_when_it_hangs(site: Site) -> None:
    paths = {name: probe["httpGet"]["path"] for name, probe in probes("base")}

    async def passed() -> set[str]:
        return {name for name, path in paths.items() if (await site.http.get(path)).status_code == HTTPStatus.OK}

    assert await passed() == {"startupProbe", "readinessProbe", "livenessProbe"}
    site.engine.facts, facts = None, site.engine.facts  # it restarts
    site.engine.healthy = False
    assert await passed() == {"livenessProbe"}
    site.engine.facts = facts  # it hangs
    assert await passed() == set()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_may_write_to_volumes_only_and_has_no_rights(variant: str) -> None:
    assert VOLUMES | {"/tmp"} <= {each["mountPath"] for each in container(variant)["volumeMounts"]}
    own = {each["name"] for each in pod(variant)["volumes"]}
    claimed = built(variant)["StatefulSet", "warmturn"]["spec"]["volumeClaimTemplates"]
    assert {each["name"] for each in container(variant)["volumeMounts"]} == own | {
        each["metadata"]["name"] for each in claimed
    }
    assert container(variant)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    context = pod(variant)["securityContext"]
    assert context["runAsNonRoot"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (USER, GROUP, GROUP)
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"  # else private folders would become the group's


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_service_writes_our_settings(variant: str) -> None:
    # A Service NAME sets NAME_PORT in every pod that lets it, and ours is called like our prefix.
    services = {name for kind, name in built(variant) if kind == "Service"}
    assert any(f"{name}_PORT".upper() in SETTINGS for name in services)
    assert pod(variant)["enableServiceLinks"] is False


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_find_the_pods(variant: str) -> None:
    objects = built(variant)
    spec = objects["StatefulSet", "warmturn"]["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= labels
    assert objects["PodDisruptionBudget", "warmturn"]["spec"]["selector"]["matchLabels"].items() <= labels
    for (kind, _), each in objects.items():
        if kind == "Service":
            assert each["spec"]["selector"].items() <= labels
            assert [port["targetPort"] for port in each["spec"]["ports"]] == ["http"]
    assert objects["Service", spec["serviceName"]]["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_log_has_room_beside_the_kv(variant: str) -> None:
    claims = built(variant)["StatefulSet", "warmturn"]["spec"]["volumeClaimTemplates"]
    sizes = {each["metadata"]["name"]: each["spec"]["resources"]["requests"]["storage"] for each in claims}
    space = ServeConfig(disk_space=environment(variant)["WARMTURN_DISK_SPACE"]).disk_space  # type: ignore[arg-type]
    assert space is not None
    volume = int(sizes["data"].removesuffix("Gi")) * 2**30
    assert volume / 2 < space < volume * 0.95


def test_a_model_is_divided_among_as_many_gpus_as_there_are() -> None:
    limits = container("gpu")["resources"]["limits"]
    assert environment("gpu")["WARMTURN_TENSOR_PARALLEL"] == limits[GPU]
    assert environment("gpu")["WARMTURN_DEVICE"] == "cuda"
    assert GPU not in container("base")["resources"]["limits"]


def test_replicas_share_a_log_and_a_remote_tier() -> None:
    assert built("replicas")["StatefulSet", "warmturn"]["spec"]["replicas"] > 1
    more = set(environment("replicas")) - set(environment("base"))
    assert more == {"WARMTURN_DATABASE", "WARMTURN_REMOTE"}
    assert all(environment("replicas")[name] is None for name in more)  # of the Secret
    assert built("base")["StatefulSet", "warmturn"]["spec"]["replicas"] == 1

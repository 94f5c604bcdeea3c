"""What Ray Serve is told, without running it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from server.cluster import ray_serve
from server.cluster.replica import Replica, longest_goodbye, own_folder
from server.config.cluster_options import ClusterConfig
from server.config.command_line import parse
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.log import data_dir
from server.telemetry import log_context

ROOT = Path(__file__).resolve().parent.parent.parent
RAYSERVICE = ROOT / "deploy" / "kubernetes" / "rayservice.yaml"
SHARED = ["--database", "postgresql://warm:s3cret@db/log", "--remote", "s3://bucket/folder"]


def config(*arguments: str) -> ClusterConfig:
    parsed = parse(["cluster", *arguments])
    assert isinstance(parsed, ClusterConfig)
    return parsed


def schema(deployment: dict[str, Any]) -> Any:
    from ray.serve.schema import ServeDeploySchema

    return ServeDeploySchema.model_validate(deployment)


def test_the_configuration_is_one_for_serve(ray: None) -> None:
    told = ray_serve.deployment(config("--replicas", "3", "--api-key", "ann=key1", "--port", "9000", *SHARED))
    (application,) = schema(told).applications
    assert application.import_path == "server.cluster.ray_serve:build"
    assert [(d.name, d.num_replicas) for d in application.deployments] == [("Server", 3)]
    assert told["http_options"] == {"host": "127.0.0.1", "port": 9000}


def test_another_number_of_replicas_changes_nothing_else() -> None:
    three, two = (ray_serve.deployment(config("--replicas", number, *SHARED)) for number in "32")
    (one,), (other,) = three["applications"], two["applications"]
    assert one.pop("deployments") != other.pop("deployments")
    assert three == two  # other args would replace all replicas


KEYS = ["--api-key", "ann=key1", "--api-key", "bob=key2"]
ENVIRONMENT = {
    "WARMTURN_API_KEY": "ann=key1,bob=key2",
    "WARMTURN_DATABASE": SHARED[1],
    "WARMTURN_REMOTE": SHARED[3],
}


class NoRay:
    """In place of Ray's module: what it is told, and the environment that its processes inherit."""

    def init(self, **told: Any) -> None:
        self.told, self.inherited = told, {**os.environ}


def test_ray_is_told_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    given = config(*KEYS, *SHARED)
    ray = NoRay()
    ray_serve.begin(ray, given)
    assert ray.inherited == ENVIRONMENT
    assert not [
        secret for secret in ("s3cret", "key1", "bucket") if secret in str((ray.told, ray_serve.deployment(given)))
    ]


def test_a_cluster_that_is_there_has_the_secrets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["--ray-address", "auto"]
    ray = NoRay()
    for flags, flag in ((KEYS, "--api-key"), (SHARED[:2], "--database"), (SHARED[2:], "--remote")):
        with pytest.raises(UsageError, match=f"^{flag}: ") as refused:
            ray_serve.begin(ray, config(*there, *flags))
        assert not [secret for secret in ("s3cret", "key1", "bucket") if secret in str(refused.value)]
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    ray_serve.begin(ray, config(*there))
    assert ray.told["address"] == "auto"
    with pytest.raises(UsageError, match=r"^--api-key: "):
        ray_serve.begin(ray, config(*there, "--api-key", "ann=other"))


def started(replica: Replica) -> list[Any]:
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def start() -> None:
        await replica.__serve_build_asgi_app__()({"type": "lifespan"}, receive, send)

    asyncio.run(start())
    return sent


def test_a_node_without_the_keys_of_the_others_serves_nobody(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (application,) = ray_serve.deployment(config(*KEYS, *SHARED))["applications"]
    for name in ("WARMTURN_DATABASE", "WARMTURN_REMOTE"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    built = ray_serve.build(application["args"])
    sent = started(Replica(*built._bound_deployment.init_args))
    told = "WARMTURN_API_KEY is not in the environment of this node"
    assert sent == [{"type": "lifespan.startup.failed", "message": told}]


def test_a_replica_is_told_what_the_command_was(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config("--replicas", "2", "--kv-memory", "1GiB", "--drain-seconds", "7", *KEYS, *SHARED)
    (application,) = ray_serve.deployment(given)["applications"]
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    built = ray_serve.build(application["args"])
    deployment = built._bound_deployment
    settings, needs, path = deployment.init_args
    assert path is None
    assert needs == [*ENVIRONMENT]
    served = ServeConfig(**settings)
    for name in ServeConfig.model_fields:
        assert getattr(served, name) == getattr(given, name), name
    assert deployment.name == "Server"
    router = deployment._deployment_config.request_router_config.request_router_class
    assert "server.cluster.router.SessionRouter" in str(router)
    assert deployment._deployment_config.graceful_shutdown_timeout_s == longest_goodbye(given) > 14


def test_replicas_come_and_go_with_the_load(ray: None) -> None:
    told = ray_serve.deployment(config("--replicas", "1", "--max-replicas", "4", "--replica-requests", "8", *SHARED))
    ((deployment,),) = [application.deployments for application in schema(told).applications]
    scaling = deployment.autoscaling_config
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (1, 4, 8)


@pytest.mark.parametrize(("given", "missing"), [([], "--database"), (SHARED[:2], "--remote")])
def test_replicas_have_to_share(given: list[str], missing: str) -> None:
    with pytest.raises(UsageError, match=f"^{missing}: "):
        ray_serve.check_shared(config(*given))
    ray_serve.check_shared(config("--replicas", "1", *given))
    with pytest.raises(UsageError, match=f"^{missing}: "):
        ray_serve.check_shared(config("--replicas", "1", "--max-replicas", "2", *given))


def test_on_one_machine_they_share_what_is_in_the_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ["--data-dir", str(tmp_path)]
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "segment").write_bytes(bytes(10_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    made = ray_serve.with_defaults(config(*here))
    assert (made.database, made.remote) == (f"sqlite:///{tmp_path}/log.sqlite", f"file://{tmp_path}/remote")
    assert ray_serve.settings(made)["remote_space"] == 101_000
    ray_serve.check_shared(made)
    assert ray_serve.with_defaults(config(*here, "--remote-space", "1M")).remote_space == 1_000_000
    named = ray_serve.with_defaults(config(*here, *SHARED))
    assert [named.database, named.remote, named.remote_space] == [SHARED[1], SHARED[3], None]


def test_its_data_dir_is_no_other_servers(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`warmturn serve` would open the same log as its own."""

    def begin(*_: object) -> None:
        with pytest.raises(data_dir.InUse), data_dir.locked(tmp_path):
            pass
        raise Reached

    class Reached(Exception):
        pass

    monkeypatch.setattr(log_context, "configure", lambda *_: None)
    monkeypatch.setattr(ray_serve, "begin", begin)
    with pytest.raises(Reached):
        ray_serve.cluster(config("--data-dir", str(tmp_path)))
    with data_dir.locked(tmp_path), pytest.raises(data_dir.InUse):
        ray_serve.cluster(config("--data-dir", str(tmp_path)))


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"^Ray is not installed: pip install .*\[ray\]'$"):
        ray_serve.cluster(config(*SHARED))


def test_each_replica_of_a_machine_has_a_folder_and_the_next_one_takes_what_is_free(tmp_path: Path) -> None:
    base = ServeConfig(data_dir=tmp_path)
    with ExitStack() as first, ExitStack() as second, ExitStack() as third:
        assert own_folder(base, first).data_dir == tmp_path / "replica-0"
        assert own_folder(base, second).data_dir == tmp_path / "replica-1"
        first.close()
        assert own_folder(base, third).data_dir == tmp_path / "replica-0"


def test_the_rayservice_is_one_for_serve(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    document = yaml.safe_load(RAYSERVICE.read_text())
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayService")
    (application,) = schema(yaml.safe_load(document["spec"]["serveConfigV2"])).applications
    workers = document["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    for variable in workers["containers"][0]["env"]:
        monkeypatch.setenv(variable["name"], {"WARMTURN_API_KEY": "a=b"}.get(variable["name"], "s3://b/f"))
    built = ray_serve.build(application.args)
    assert application.import_path == ray_serve.IMPORT_PATH
    assert [deployment.name for deployment in application.deployments] == [built._bound_deployment.name]
    grace = built._bound_deployment._deployment_config.graceful_shutdown_timeout_s
    assert workers["terminationGracePeriodSeconds"] > grace
    cores = workers["containers"][0]["resources"]["limits"]["cpu"]
    assert float(cores) >= application.args["replica_cpus"]
    assert document["spec"]["rayClusterConfig"]["rayVersion"] in (ROOT / "constraints.txt").read_text()

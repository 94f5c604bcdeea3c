"""`warmturn cluster`: replicas of the server on Ray Serve. ``server.cluster.ray_serve:build`` makes the same
application for deployments by Ray Serve's own configuration files.

Everything goes by such a configuration, also here: with another number of replicas under ``deployments`` some are added
or removed, and the others stay as they are. With other ``args`` all are replaced.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize

from scheduler.extras import install_command
from server.cluster import env_file
from server.cluster.env_file import SECRETS
from server.cluster.replica import Replica, longest_goodbye
from server.config.cluster_options import ClusterConfig
from server.config.command_line import configure, environment_variable
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.log import data_dir
from server.telemetry import log_context
from server.telemetry.log_context import say

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ApplicationStatusOverview

APPLICATION = "warmturn"
DEPLOYMENT = "Server"
IMPORT_PATH = "server.cluster.ray_serve:build"
ROUTER = "server.cluster.router.SessionRouter"
MISSING = f"Ray is not installed: {install_command('ray')}"
MOST_AT_ONCE = 100_000  # requests of a replica: it is our queue that is full, with a 429, not Ray's
CHECK_SECONDS = 5.0  # between two looks at a replica's health
LOOK_SECONDS = 0.5  # between two looks at what becomes of a deployment
# Ray's proxy is killed when it has not started within three times so many seconds; 5 if nothing is said.
PROXY_START_SECONDS = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60"
# So long a replica may take to say how much it has to do before its sessions go to another one; 0.1 if nothing is said,
# which a busy machine exceeds.
ANSWER_SECONDS = "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1"
# It reads ids in bodies for the router. On the nodes of a cluster this has to be in the environment of `ray start`.
PROXY_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "server.cluster.body_routing:middlewares"


def build(args: Mapping[str, Any]) -> Application:
    """Ray Serve's application over ``args``, fields of ClusterConfig by their names; what is not given comes from the
    environment, as for `warmturn serve`. ``needs`` are environment variables that every node must have. Raises
    ValueError for other arguments, UsageError where several replicas would not share their sessions."""
    from ray import serve

    needs = args.get("needs", ())
    config = ClusterConfig(**{name: value for name, value in args.items() if name != "needs"})
    config = with_file(config, {*args})
    check_shared(config)
    made = serve.deployment(**options(config))(serve.ingress()(Replica))
    application: Application = made.bind(settings(config), sorted({*needs, *secrets(config)}), path_of(config))
    return application


def cluster(config: ClusterConfig) -> int:
    """Run the command; its exit status. Raises UsageError."""
    try:
        import ray
        from ray import serve
    except ImportError:
        raise UsageError(MISSING) from None
    log_context.configure(config.log_format, config.log_level)
    config = with_file(config, config.model_fields_set)
    with ExitStack() as stack:
        if config.ray_address is None:
            # Its replicas lock folders below this one. A `warmturn serve` would take the log in it for its own.
            folder = stack.enter_context(data_dir.locked(config.data_dir.expanduser().absolute()))
            config = with_defaults(config.model_copy(update={"data_dir": folder}))
        check_shared(config)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault(*PROXY_START_SECONDS)
        os.environ.setdefault(*ANSWER_SECONDS)
        os.environ.setdefault(*PROXY_CALLBACK)
        begin(ray, config)
        stack.callback(ray.shutdown)
        if config.ray_address is None:
            stack.callback(serve.shutdown)
        status = deploy(config)
        if status != 0 or config.ray_address is not None:
            return status
        if not config.has_keys and not config.host.startswith("127.") and config.host not in ("localhost", "::1"):
            say("warning: no --api-key is set: everyone who reaches this port is served", logging.WARNING)
        where = f"[{config.host}]" if ":" in config.host else config.host
        say(f"serving {config.name} at http://{where}:{config.port} ({replicas_of(config)})", result=True)
        wait_for_signal()
        say("stopping")
        return 0


def with_file(config: ClusterConfig, given: Collection[str]) -> ClusterConfig:
    """The configuration with the secrets of its ``env_file``. Raises UsageError, also where one of them is among the
    fields that were ``given`` otherwise: it would not be clear which one holds."""
    if not (there := from_file(config)):
        return config
    if twice := [environment_variable(ServeConfig, name) for name in there if name in given]:
        raise UsageError(f"--env-file: {twice[0]} is in the file and also in a flag or the environment: remove one")
    told = {name: getattr(config, name) for name in config.model_fields_set}
    return configure(ClusterConfig, {**told, **there})


def from_file(config: ClusterConfig) -> dict[str, str]:
    """The secrets in the ``env_file``, by the names of their fields. Raises UsageError."""
    path = path_of(config)
    return {} if path is None else env_file.fields(env_file.read(Path(path)))


def path_of(config: ClusterConfig) -> str | None:
    """Where the ``env_file`` is on each node."""
    return None if config.env_file is None else str(config.env_file.expanduser().absolute())


def with_defaults(config: ClusterConfig) -> ClusterConfig:
    """What replicas on one machine share where nothing else is named: a file and a folder in the data dir, which is
    there. The folder may have a tenth of what is free on the disk, as the cache of each replica."""
    data = config.data_dir
    shared = {"database": f"sqlite:///{data}/log.sqlite", "remote": f"file://{data}/remote"}
    missing: dict[str, Any] = {name: value for name, value in shared.items() if getattr(config, name) is None}
    if "remote" in missing and config.remote_space is None:
        stored = sum(file.stat().st_size for file in (data / "remote").rglob("*") if file.is_file())
        missing["remote_space"] = ByteSize((shutil.disk_usage(data).free + stored) // 10)
    return config.model_copy(update=missing)


def check_shared(config: ClusterConfig) -> None:
    """Raises UsageError, where several replicas would not have the same sessions."""
    if most_replicas(config) == 1:
        return
    if config.database is None:
        raise UsageError("--database: replicas share their sessions in a database: postgresql://...")
    if config.remote is None:
        raise UsageError("--remote: replicas share their KV cache at an fsspec URL: s3://..., file:///shared/folder")


def most_replicas(config: ClusterConfig) -> int:
    """How many there may be."""
    return max(config.replicas, config.max_replicas or 1)


def replicas_of(config: ClusterConfig) -> str:
    """How many there are, in words."""
    most = most_replicas(config)
    return f"{config.replicas} replicas" if most == config.replicas else f"{config.replicas} to {most} replicas"


def settings(config: ClusterConfig) -> dict[str, Any]:
    """What a replica is told: fields of ServeConfig."""
    ours = {*ServeConfig.model_fields} - {*SECRETS}
    told = config.model_dump(mode="json", include=ours, exclude_unset=True)
    return {**told, "data_dir": str(config.data_dir)}


def secrets(config: ClusterConfig) -> dict[str, str]:
    """What a replica finds in the environment of its node, or in the ``env_file`` there."""
    told = {"database": config.database, "remote": config.remote}
    told["api_key"] = ",".join(f"{name}={key}" for name, key in config.api_key.items()) or None
    return {environment_variable(ServeConfig, name): value for name, value in told.items() if value is not None}


def many(config: ClusterConfig) -> dict[str, Any]:
    """The deployment's options for the number of replicas."""
    most = most_replicas(config)
    if most == config.replicas:
        return {"num_replicas": config.replicas}
    load = {"min_replicas": config.replicas, "max_replicas": most, "target_ongoing_requests": config.replica_requests}
    return {"num_replicas": "auto", "autoscaling_config": load}


def options(config: ClusterConfig) -> dict[str, Any]:
    """The deployment's options: each replica has its cores, and its GPUs where there are any."""
    return {
        "name": DEPLOYMENT,
        **many(config),
        "ray_actor_options": {"num_cpus": config.replica_cpus, "num_gpus": gpus(config)},
        "max_ongoing_requests": MOST_AT_ONCE,
        "health_check_period_s": CHECK_SECONDS,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": longest_goodbye(config),
        "request_router_config": {"request_router_class": ROUTER},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    }


def gpus(config: ClusterConfig) -> int:
    """GPUs of a replica."""
    import ray

    there = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1
    return config.tensor_parallel if config.device == "cuda" or (config.device == "auto" and there) else 0


def deployment(config: ClusterConfig) -> dict[str, Any]:
    """The configuration for Ray Serve."""
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {
            **settings(config),
            "replica_cpus": config.replica_cpus,
            "needs": sorted(secrets(config)),
            **({} if path_of(config) is None else {"env_file": path_of(config)}),
        },
        "deployments": [{"name": DEPLOYMENT, **many(config)}],
    }
    return {
        "proxy_location": "HeadOnly" if config.ray_address is None else "EveryNode",
        "http_options": {"host": config.host, "port": config.port},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [application],
    }


def begin(ray: Any, config: ClusterConfig) -> None:
    """Connect to Ray, or start it on this machine, where replicas inherit the environment: without the secrets of the
    ``env_file``, which they read themselves. Raises UsageError."""
    filed = {environment_variable(ServeConfig, name) for name in from_file(config)}
    ours = {variable: value for variable, value in secrets(config).items() if variable not in filed}
    if config.ray_address is not None:
        for variable, value in ours.items():
            if os.environ.get(variable) != value:
                flag = variable.removeprefix("WARMTURN_").lower().replace("_", "-")
                raise UsageError(f"--{flag}: with --ray-address set {variable}, here and for the nodes of the cluster")
        try:
            ray.init(address=config.ray_address, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError):
            raise UsageError("--ray-address: no Ray cluster answers") from None
        return
    os.environ.update(ours)
    cores = max(os.cpu_count() or 1, config.replica_cpus * most_replicas(config) + 1)
    ray.init(
        address="local",
        num_cpus=int(cores + 0.999),
        include_dashboard=False,
        log_to_driver=True,
        logging_level="error",
    )


def deploy(config: ClusterConfig) -> int:
    """Deploy the application and wait until it runs; 2 if it cannot."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus, ServeDeploySchema

    wanted = ServeDeploySchema.model_validate(deployment(config))
    http = wanted.http_options.model_dump()
    serve.start(proxy_location=wanted.proxy_location, http_options=http)
    from ray.serve.context import _get_global_client

    _get_global_client().deploy_apps(wanted)
    waiting = threading.Event()
    while True:
        told = serve.status().applications.get(APPLICATION)
        if told is not None and told.status == ApplicationStatus.RUNNING and is_so(config, told):
            return 0
        if told is not None and told.status == ApplicationStatus.DEPLOY_FAILED:  # an unhealthy one is being mended
            say(next(iter(told.message.splitlines()), "the replicas could not be started"), logging.ERROR)
            return 2
        waiting.wait(LOOK_SECONDS)


def is_so(config: ClusterConfig, told: ApplicationStatusOverview) -> bool:
    """Whether exactly the wanted number of replicas runs."""
    states = told.deployments[DEPLOYMENT].replica_states
    enough = config.replicas <= states.get("RUNNING", 0) <= most_replicas(config)
    return bool(enough and sum(states.values()) == states["RUNNING"])


def wait_for_signal() -> None:
    """Until SIGTERM or SIGINT."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    while not told.wait(LOOK_SECONDS):
        pass

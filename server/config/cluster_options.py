"""The options of `warmturn cluster`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from server.config.option_types import Count
from server.config.serve_options import ServeConfig


class ClusterConfig(ServeConfig):
    """All that `warmturn serve` is told, for each replica, and how many of them there are. ``data_dir`` has a folder
    for each replica of a machine."""

    replicas: Count = Field(default=2, description="servers that share the sessions")
    max_replicas: Count | None = Field(
        default=None,
        description="most servers; Ray adds and removes them with the load",
        json_schema_extra={"metavar": "REPLICAS", "default": "as many as --replicas"},
    )
    replica_requests: Count = Field(
        default=16,
        description="running requests per replica that Ray aims at with --max-replicas",
        json_schema_extra={"metavar": "REQUESTS"},
    )
    replica_cpus: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="cores that Ray reserves for a replica; without a GPU also its compute threads",
        json_schema_extra={"metavar": "CORES", "default": "1"},
    )
    ray_address: str | None = Field(
        default=None,
        min_length=1,
        description="existing Ray cluster, HOST:PORT or auto: the replicas are deployed to it, and the command ends",
        json_schema_extra={"metavar": "ADDRESS", "default": "a new one on this machine"},
    )
    env_file: Path | None = Field(
        default=None,
        description="file with WARMTURN_API_KEY=..., WARMTURN_DATABASE=..., WARMTURN_REMOTE=... and variables of other "
        "programs, in the format of systemd's EnvironmentFile, with mode 0600; at the same path on each node, where "
        "the replicas read it; Ray gets only the path",
        json_schema_extra={"metavar": "FILE", "default": "none"},
    )

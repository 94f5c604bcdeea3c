"""What `warmturn cluster` is told."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from server.config.serve_options import Count, ServeConfig


class ClusterConfig(ServeConfig):
    """All that `warmturn serve` is told, for each replica, and how many of them there are. ``data_dir`` has a folder
    for each replica of a machine."""

    replicas: Count = Field(default=2, description="servers that share the sessions")
    max_replicas: Count | None = Field(
        default=None,
        description="servers while there is much to do; they come and go with the requests",
        json_schema_extra={"metavar": "REPLICAS", "default": "as many as --replicas"},
    )
    replica_requests: Count = Field(
        default=16,
        description="running requests per replica that --max-replicas aims at",
        json_schema_extra={"metavar": "REQUESTS"},
    )
    replica_cpus: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="cores that Ray keeps for a replica; without a GPU also the threads that compute in it",
        json_schema_extra={"metavar": "CORES", "default": "1"},
    )
    ray_address: str | None = Field(
        default=None,
        min_length=1,
        description="a Ray cluster that is there, HOST:PORT or auto: it is told of the replicas, and the command ends",
        json_schema_extra={"metavar": "ADDRESS", "default": "one of its own on this machine"},
    )
    env_file: Path | None = Field(
        default=None,
        description="a file of WARMTURN_API_KEY=..., WARMTURN_DATABASE=..., WARMTURN_REMOTE=... and variables of other "
        "programs, as systemd's EnvironmentFile, with mode 0600; it is at this path on each node, where the replicas "
        "read it, and Ray is told the path only",
        json_schema_extra={"metavar": "FILE", "default": "none"},
    )

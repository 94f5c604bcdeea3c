"""`EngineConfig`: what an engine process is started with. Imported by both processes."""

from __future__ import annotations

import msgspec


class AdapterSource(msgspec.Struct, frozen=True):
    """An adapter to load: its name, and the folder that it is in. ``needed``: the model is not served without it."""

    name: str
    folder: str
    needed: bool = True


class EngineConfig(msgspec.Struct, frozen=True):
    """What the engine process is started with: a line of JSON on its standard input. An empty line follows as soon
    as the engine may read files.
    """

    address: str  # zmq endpoint that the server has bound
    model: str  # hub id or folder
    generation_config: str = "model"  # model | openai | path of a generation config, as JSON
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    weights: str = "auto"  # auto | int8 | int4
    activations: str = "auto"  # auto | int8: inputs of products with packed weights
    kv_dtype: str = "auto"  # auto | int8 | fp8: how KV is kept in memory; auto: in the dtype that the model computes in
    max_context: int | None = None  # tokens; None: what the model allows
    kv_memory: int | None = None  # bytes of the device tier; None: measured
    host_memory: int | None = None  # bytes of the host tier; None: 0 on CPU, a quarter of RAM with CUDA
    memory_share: float = 1.0  # of the memory that is measured; the rest is for other models' engines
    max_running: int = 256
    max_step_tokens: int | None = None  # None: 512 on CPU, 2048 on CUDA
    max_queued: int = 1024
    verdicts: str | None = None  # folder that remembers which mode fits which model
    kv_folder: str | None = None  # of the disk tier; None: there is none
    kv_kept: tuple[str, ...] = ()  # fingerprints of other models whose KV in that folder stays
    disk_space: int | None = None  # bytes of the disk tier; None: a tenth of what is free at start; 0: no disk tier
    disk_floor: int | None = None  # bytes that stay free on that disk; None: a twentieth of it, at most 5 GiB
    packed_space: int | None = None  # bytes of packed weights that are kept for later starts; None: measured; 0: none
    remote: str | None = None  # fsspec URL of the tier below the disk
    remote_space: int | None = None  # bytes of that tier; None: no limit
    kv_at_rest: str = "exact"  # exact | int8 | fp8: how KV is written to disk
    tensor_parallel: int = 1  # ranks among which the model is divided, one process and one device each
    speculate: str = "off"  # auto | off: whether tokens are drafted
    draft_model: str | None = None  # hub id or folder of a small model that drafts tokens
    adapters: tuple[AdapterSource, ...] = ()
    tenant_share: float = 1.0  # of every tier that one tenant may hold when others need the room
    offline: bool = False  # take files of the hub only where they have been downloaded before
    log_format: str = "text"  # text | json
    log_level: str = "info"  # debug | info | warning | error

    def with_adapter(self, source: AdapterSource) -> EngineConfig:
        """The same with one more adapter, in place of another one of its name."""
        return msgspec.structs.replace(self, adapters=(*self.without_adapter(source.name).adapters, source))

    def without_adapter(self, name: str) -> EngineConfig:
        return msgspec.structs.replace(self, adapters=tuple(one for one in self.adapters if one.name != name))

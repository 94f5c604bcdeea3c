"""What the options of ``warmturn serve`` say of an engine."""

from __future__ import annotations

from scheduler.engine_config import AdapterSource, EngineConfig
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError


def engine_config(options: ServeConfig, share: float = 1.0, models: int = 1) -> EngineConfig:
    """What the engine process is started with; its address is filled in at every start. ``share``: part of the
    machine's memory that a KV cache of no given size takes its own from; ``models``: that share the disk space.
    Raises UsageError for options that exclude each other.
    """
    if options.draft_model is not None and options.speculate == "off":
        raise UsageError("--draft-model: it drafts with --speculate auto only")
    return EngineConfig(
        address="",
        model=options.source,
        generation_config=options.generation_config,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        activations=options.activations,
        kv_dtype=options.kv_dtype,
        max_context=options.max_context,
        kv_memory=None if options.kv_memory is None else int(options.kv_memory),
        host_memory=None if options.host_memory is None else int(options.host_memory),
        memory_share=share,
        max_running=options.max_running,
        max_step_tokens=options.max_step_tokens,
        max_queued=options.max_queued,
        verdicts=str(options.data_dir / "verdicts"),
        kv_folder=str(options.data_dir / "kv"),
        disk_space=None if options.disk_space is None else int(options.disk_space) // models,
        disk_floor=None if options.disk_floor is None else int(options.disk_floor),
        packed_space=None if options.packed_space is None else int(options.packed_space),
        remote=options.remote,
        remote_space=None if options.remote_space is None else int(options.remote_space),
        kv_at_rest=options.kv_at_rest,
        adapters=tuple(AdapterSource(name, folder) for name, folder in options.adapter.items()),
        tenant_share=options.tenant_share,
        tensor_parallel=options.tensor_parallel,
        speculate=options.speculate,
        draft_model=options.draft_model,
        log_format=options.log_format,
        log_level=options.log_level,
    )

"""How tests, and compiling them, are divided between the workers of pytest-xdist."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import sys
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parent.parent
SOURCES = ("cache", "scheduler", "server", "tests", "tools")
PAGE = "tests/ui"
# Files, the longest first, so that none is left alone with one of them at the end.
LONG = (
    "tests/scheduler/core/test_equality.py",
    "tests/scheduler/accel/gpu/test_compiled.py",
    "tests/scheduler/core/test_speculation.py",
    "tests/server/cli/test_command_line.py",
    "tests/scheduler/test_process.py",
    "tests/server/log/recovery/test_salvage.py",
    "tests/scheduler/model/test_probe.py",
    "tests/test_tensor_parallel_server.py",
    "tests/scheduler/model/test_decode_graphs.py",
    "tests/scheduler/accel/cpu/test_fusion_models.py",
    "tests/test_windows_over_http.py",
    "tests/scheduler/parallel/test_tensor_parallel.py",
    "tests/server/api/test_bad_input.py",
    "tests/test_demo_server.py",
    "tests/scheduler/test_engine_import_savings.py",
    "tests/cluster/test_leases.py",
    "tests/server/http/test_connection.py",
    "tests/test_pictures_over_http.py",
    "tests/cluster/test_dead_path.py",
    "tests/scheduler/media/test_seeing.py",
    "tests/server/cli/doctor/test_doctor_model.py",
    "tests/architectures/test_sample.py",
    "tests/cluster/test_nginx.py",
    "tests/test_equality_over_http.py",
    "tests/cluster/test_processes.py",
    "tests/crash/test_damage.py",
    "tests/agents/test_recordings.py",
    "tests/scheduler/accel/cpu/test_packed_matrix.py",
    "tests/test_imports.py",
    "tests/scheduler/accel/cpu/test_matrix.py",
    "tests/server/test_drain.py",
    "tests/test_embeddings_over_http.py",
    "tests/scheduler/model/test_twin.py",
    "tests/scheduler/model/test_packed_checkpoint.py",
    "tests/crash/test_smoke.py",
    "tests/scheduler/accel/cpu/test_layer_chain.py",
    "tests/cache/tiers/test_archive.py",
    "tests/scheduler/model/test_loader.py",
    "tests/scheduler/accel/cpu/test_linear.py",
    "tests/architectures/test_media_sample.py",
    "tests/server/test_torchless.py",
    "tests/scheduler/accel/cpu/test_experts.py",
    "tests/server/log/test_timeline.py",
    "tests/scheduler/media/test_hearing.py",
    "tests/server/api/sessions/test_routes.py",
    "tests/scheduler/core/test_sampling.py",
    "tests/server/media/test_hostile.py",
    "tests/test_thinking_over_http.py",
    "tests/scheduler/parallel/test_tensor_parallel_models.py",
    "tests/test_docs_commands.py",
    "tests/scheduler/model/test_packed_experts_checkpoint.py",
    "tests/test_bench_gpu.py",
    "tests/server/config/test_serve_options.py",
    "tests/scheduler/accel/gpu/test_joined_products.py",
    "tests/scheduler/forward/test_cache_length.py",
    "tests/test_formats_over_http.py",
    "tests/server/engine/test_engine_process.py",
    "tests/server/api/sessions/test_capsule.py",
    "tests/scheduler/core/test_windows.py",
    "tests/cache/tiers/test_archive_fuzz.py",
    "tests/server/chat/test_tool_prompts.py",
    "tests/scheduler/accel/cpu/test_quantised.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """The page first, then the files of ``LONG``; the order within a file stays."""
    rank = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: -1 if is_of_page(item.nodeid) else rank.get(item.nodeid.partition("::")[0], len(LONG)))


class FilesAndPage(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """A file to a worker, and all files of the page to one: there is one browser, which mostly waits."""

    def _split_scope(self, nodeid: str) -> str:
        return PAGE if is_of_page(nodeid) else str(super()._split_scope(nodeid))


def is_of_page(nodeid: str) -> bool:
    """Whether a test opens the page in a browser."""
    return nodeid.startswith(f"{PAGE}/")


def compile_share(config: pytest.Config) -> None:
    """A worker compiles its share of all files that were never compiled: each would else compile all of them, a quarter
    of a minute of a checkout's first run. pytest offers no public way to compile what it rewrites.
    """
    if sys.dont_write_bytecode or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    files = sorted(file for folder in SOURCES for file in (ROOT / folder).rglob("*.py"))
    for file in files[number::count]:
        if file.name == "conftest.py" or file.name.startswith("test_"):
            _compile_test(file, config)
        elif not Path(importlib.util.cache_from_source(str(file))).exists():
            py_compile.compile(str(file))


def _compile_test(file: Path, config: pytest.Config) -> None:
    folder = get_cache_dir(file)
    compiled = folder / (file.stem + PYC_TAIL)
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source_hash, code = _rewrite_test(file, config)
        _write_pyc(config.stash[assertstate_key], code, source_hash, compiled)

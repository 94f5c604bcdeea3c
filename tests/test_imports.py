"""The direction of imports and the ban on model names, held by reading every module's syntax tree."""

import ast
import gc
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide  # as `make check` runs it

ROOT = Path(__file__).resolve().parent.parent
Modules = dict[str, ast.Module]
NAMES_OF_MODELS = {"model_type", "architectures", "name_or_path", "_name_or_path"}
NAMES_OF_CLASSES = {"__name__", "__qualname__"}  # where models are at hand: everywhere but in server

RULES = {
    "server": {"torch", "cache", "scheduler"},  # and of these only what DOORS are
    "scheduler": {"server", "fastapi", "starlette", "pydantic", "pydantic_settings", "uvicorn", "httpx", "sqlalchemy"},
    "cache": {"server", "scheduler", "fastapi", "starlette", "pydantic", "pydantic_settings", "uvicorn", "zmq"},
}

# What both processes need, and what imports nothing of ours but each other.
DOORS = (
    "cache.durable_files",
    "cache.media_frames",
    "cache.media_ids",
    "cache.tier",
    "scheduler.cgroups",
    "scheduler.adapter_messages",
    "scheduler.engine_config",
    "scheduler.engine_stats",
    "scheduler.disk_floor",
    "scheduler.extras",
    "scheduler.kept_names",
    "scheduler.model_names",
    "scheduler.logs",
    "scheduler.gguf_pooling",
    "scheduler.gguf_reader",
    "scheduler.model_facts",
    "scheduler.model_task",
    "scheduler.grammar_limits",
    "scheduler.pooling_messages",
    "scheduler.protocol",
    "scheduler.turn_receipt",
    "scheduler.sampling_params",
    "scheduler.speech_messages",
    "scheduler.tile_space",
    "scheduler.tokenizer_parts",
)


@pytest.fixture(scope="module")
def modules() -> Modules:
    """The syntax tree of each. Not read before a test asks: every worker collects this file, and one runs it. A test
    looks at all of them, as a test takes longer than a look.
    """
    gc.disable()  # it would look through millions of nodes, again and again
    found = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in ("server", "scheduler", "cache")
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    gc.enable()
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """The dotted names of all modules that are imported, at the top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_door(name: str) -> bool:
    """Whether a dotted name is one of ``DOORS`` or something in it."""
    return any(f"{name}.".startswith(f"{door}.") for door in DOORS)


def forbidden(module: str, tree: ast.Module) -> set[str]:
    """What a module imports against the rules."""
    banned = RULES[module.partition("/")[0]]
    found = {name for name in imports(tree) if name.partition(".")[0] in banned}
    if module.startswith("server/"):
        found -= {name for name in found if is_door(name)}
    return found


def compared(tree: ast.Module) -> Iterator[str]:
    """The attributes on either side of each comparison and in each match subject; getattr's strings are attributes."""
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.Match):
            sides = [node.subject]
        for part in (part for side in sides for part in ast.walk(side)):
            if isinstance(part, ast.Attribute):
                yield part.attr
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "getattr":
                constants = (arg.value for arg in part.args if isinstance(arg, ast.Constant))
                yield from (value for value in constants if isinstance(value, str))


def names_a_model(module: str, tree: ast.Module) -> set[str]:
    """How a module compares what a model or its class is called."""
    names = NAMES_OF_MODELS if module.startswith("server/") else NAMES_OF_MODELS | NAMES_OF_CLASSES
    return {name for name in compared(tree) if name in names}


def wrong(found: Mapping[str, Collection[str]]) -> dict[str, Collection[str]]:
    """The modules in which something was found."""
    return {module: names for module, names in found.items() if names}


def test_there_are_modules_to_look_at(modules: Modules) -> None:
    assert {module.partition("/")[0] for module in modules} == set(RULES)


def test_imports_go_server_scheduler_cache(modules: Modules) -> None:
    assert wrong({module: forbidden(module, tree) for module, tree in modules.items()}) == {}


@pytest.mark.parametrize("door", DOORS)
def test_doors_import_nothing_of_ours_and_no_torch(door: str, modules: Modules) -> None:
    found = imports(modules[door.replace(".", "/") + ".py"])
    tops = {name.partition(".")[0] for name in found if not is_door(name)}
    assert not tops & {"server", "scheduler", "cache", "torch", "transformers", "zmq"}


def test_no_module_compares_a_models_name(modules: Modules) -> None:
    assert wrong({module: names_a_model(module, tree) for module, tree in modules.items()}) == {}


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("server/x.py", "import torch.nn"),
        ("server/x.py", "from scheduler.core import engine"),
        ("server/x.py", "from scheduler.core.engine_core import Engine"),
        ("server/x.py", "import scheduler.logs2"),
        ("server/x.py", "from cache.tiers.disk import DiskTier"),
        ("server/x.py", "def f():\n    from cache.pages.pool import PagePool"),
        ("scheduler/x.py", "from server.log.session_log import SessionLog"),
        ("scheduler/x.py", "import pydantic"),
        ("cache/x.py", "import scheduler.protocol"),
    ],
)
def test_a_wrong_import_would_be_found(module: str, code: str) -> None:
    assert forbidden(module, ast.parse(code)) != set()


def test_the_doors_are_open_to_the_server() -> None:
    allowed = (
        "from scheduler.protocol import Delta\nimport scheduler.protocol\nfrom scheduler.cgroups import memory_limit\n"
    )
    assert forbidden("server/x.py", ast.parse(allowed)) == set()


@pytest.mark.parametrize(
    "code",
    [
        "if config.model_type == 'llama': pass",
        "x = config.model_type in ('llama', 'qwen3')",
        "if type(layer).__name__ == 'MambaCache': pass",
        "if model.__class__.__name__.startswith('Qwen') is True: pass",
        "match config.model_type:\n    case 'llama': pass",
        "if getattr(config, 'model_type') == 'llama': pass",
    ],
)
def test_a_comparison_of_names_would_be_found(code: str) -> None:
    assert names_a_model("cache/x.py", ast.parse(code)) != set()


def test_a_script_may_ask_whether_it_is_one() -> None:
    assert names_a_model("cache/x.py", ast.parse("if __name__ == '__main__': pass")) == set()


ORDER = {  # sub-packages and single modules from the ground up: each may import those before it, and its own
    "cache": "error_line tier media_frames media_ids durable_files whole_files compiler memory segments pages "
    "attention tiers residency store known_timelines inventory",
    "scheduler": "sampling_params gguf_reader gguf_pooling model_task speech_messages model_facts "
    "adapter_messages pooling_messages engine_config tokenizer_parts grammar_limits turn_receipt "
    "engine_stats protocol logs cgroups disk_floor extras kept_names tile_space model_names "
    "meta_kernels cores checkup engine_import_savings weights read_ahead expert_choices accel.cpu "
    "accel.gpu adapters media forward parallel model sessionless speech pooling core "
    "engine_assembly process follower __main__",
    "server": "errors config workers daemon_thread surrogates torchless server_import_savings media log "
    "constraints schemas chat engine telemetry hub http middleware turns models lines batches api.ops api.openai "
    "api.embeddings api.sessions api.sharing api.stored_chats api.responses api.anthropic api.ollama api.batches "
    "api.audio api dispatch startup_app housekeeping app instance serve cluster cli commands __main__",
}
UNITS = [f"{top}.{name}" for top, names in ORDER.items() for name in names.split()]


def dotted(module: str) -> str:
    """``server.http.body`` of ``server/http/body.py``."""
    return module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def unit_of(name: str) -> str | None:
    """The innermost unit that a dotted name is in."""
    inside = [unit for unit in UNITS if f"{name}.".startswith(f"{unit}.")]
    return max(inside, key=len, default=None)


def upward(module: str, tree: ast.Module) -> set[str]:
    """What a module imports from units above its own, inside functions and for types only too."""
    own = unit_of(dotted(module))
    found = set()
    for name in imports(tree):
        unit = unit_of(name)
        if own and unit and unit.split(".")[0] == own.split(".")[0] and UNITS.index(unit) > UNITS.index(own):
            found.add(name)
    return found


def test_a_module_is_in_a_unit_and_imports_only_units_below(modules: Modules) -> None:
    plain = [module for module in modules if dotted(module) not in ORDER and not module.endswith("__init__.py")]
    assert [module for module in plain if unit_of(dotted(module)) is None] == []
    assert wrong({module: upward(module, tree) for module, tree in modules.items()}) == {}


def test_an_import_from_above_would_be_found() -> None:
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from server.turns.turn_runner import Exchange"
    assert upward("server/chat/prompts.py", ast.parse(hidden)) != set()
    assert upward("cache/pages/session.py", ast.parse("def f():\n    from cache.store import SessionStore")) != set()


def test_no_modules_import_each_other_in_a_circle(modules: Modules) -> None:
    names = {dotted(module) for module in modules}
    graph = {dotted(module): names & {*imports(tree)} - {dotted(module)} for module, tree in modules.items()}
    assert circle_of(graph) == []
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    """What remains, sorted, when modules that import nothing, or are imported by nobody, are taken away."""
    left = dict(graph)
    while True:
        used = {name for targets in left.values() for name in targets}
        kept = {name: {*targets} & left.keys() for name, targets in left.items() if targets & left.keys()}
        kept = {name: targets for name, targets in kept.items() if name in used}
        if kept == left:
            return sorted(left)
        left = kept


def test_a_sub_package_says_what_it_owns_imports_and_never_knows(modules: Modules) -> None:
    packages = [name for name in modules if name.endswith("/__init__.py") and name.count("/") > 1]
    docstrings = {name: ast.get_docstring(modules[name]) or "" for name in packages if name != "server/api/__init__.py"}
    parts = ("\n\nOwns: ", "\n\nMay import: ", "\n\nNever knows: ")
    assert [name for name, docstring in docstrings.items() if not all(part in docstring for part in parts)] == []


def test_a_file_has_at_most_400_lines(modules: Modules) -> None:
    lines = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in modules}
    assert not {name: count for name, count in lines.items() if count > 400}


def test_a_class_name_stands_for_one_class(modules: Modules) -> None:
    files: dict[str, list[str]] = {}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(name)
    assert not {name: places for name, places in files.items() if len(places) > 1}

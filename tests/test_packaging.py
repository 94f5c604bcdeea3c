"""What is installed and shipped: versions, pins, the demo model, nothing of this or that machine."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from server import __version__

ROOT = Path(__file__).resolve().parent.parent
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = WHOLE["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def pins(file: str) -> dict[str, str]:
    """Name -> version of a file of constraints."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


PINS = pins("constraints.txt")
PINNED_EXTRAS = ("dev", "e2e", "ray")  # those that `make pins` writes
REQUIREMENTS = {
    "constraints.txt": [
        *PROJECT["dependencies"],
        *(text for extra in PINNED_EXTRAS for text in PROJECT["optional-dependencies"][extra]),
    ],
    "constraints-clients.txt": WHOLE["dependency-groups"]["clients"],
}


def test_the_version_is_told_once() -> None:
    assert PROJECT["version"] == __version__


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in REQUIREMENTS.items() for text in texts])
def test_every_requirement_is_pinned_within_its_range(file: str, text: str) -> None:
    requirement, versions = Requirement(text), pins(file)
    name = canonicalize_name(requirement.name)
    assert name in versions, f"{file} does not name {name}: install it, and write the file anew (make pins)"
    assert requirement.specifier.contains(versions[name])


def test_pins_are_written_for_those_extras() -> None:
    source = (ROOT / "tools" / "pins.py").read_text()
    assert set(re.findall(r'\*extras\["(\w+)"\]', source)) == set(PINNED_EXTRAS)


def test_the_pins_hold_for_every_build_of_torch() -> None:
    assert not [name for name in PINS if name.startswith(("nvidia", "cuda", "triton"))]
    assert not [version for version in PINS.values() if "+" in version]
    torch = re.search(r"^TORCH := (\S+)$", MAKEFILE, re.MULTILINE)
    assert torch is not None
    assert torch.group(1) == PINS["torch"]


def test_the_entry_point_exists() -> None:
    module, _, function = PROJECT["scripts"]["warmturn"].partition(":")
    assert (module, function) == ("server.__main__", "main")
    namespace: dict[str, object] = {}
    exec(f"from {module} import {function}", namespace)
    assert callable(namespace["main"])


def test_the_demo_model_ships_with_the_package() -> None:
    demo = ROOT / "server" / "demo"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in demo.iterdir()}
    assert sum(path.stat().st_size for path in demo.iterdir()) < 8_000_000
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "server" in packages["packages"]


def test_ci_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``make`` in a copy of what it needs, as a user calls it, also where this test itself runs under make."""
    program = shutil.which("make")
    if program is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }
    return subprocess.run(
        [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("target", ["test-cuda", "bench-gpu"])
def test_what_needs_a_gpu_runs_where_nothing_can_be_installed(target: str, tmp_path: Path) -> None:
    asked = make(tmp_path, "-n", target, "PYTHON=python9", "INSTALLED=1").stdout.splitlines()
    assert [line.split()[:2] for line in asked] == [["python9", "-m"]]
    assert "pip" in make(tmp_path, "-n", target).stdout
    module = re.search(r"-m ((?:tools|tests)\.\w+)|(tests/\w+\.py)", asked[0])
    assert module is not None
    assert (ROOT / (module[2] or f"{module[1].replace('.', '/')}.py")).is_file()


def test_what_serves_needs_no_linters(tmp_path: Path) -> None:
    assert "pip" in make(tmp_path, "-n", "serve").stdout
    assert "[dev]" not in make(tmp_path, "-n", "serve").stdout
    assert "[dev]" in make(tmp_path, "-n", "setup").stdout


def test_all_tests_of_a_gpu_are_where_make_looks_for_them() -> None:
    marked = [path.name for path in (ROOT / "tests").rglob("*.py") if "mark." + "cuda" in path.read_text()]
    assert marked == ["test_cuda.py"]


def test_an_old_python_is_told_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    ran = make(tmp_path, "serve", f"PYTHON={old}")
    assert ran.returncode != 0
    assert ran.stdout == ""
    first, *others = ran.stderr.splitlines()
    assert first.startswith("warmturn needs Python 3.11 or newer")
    assert all(line.startswith("make") for line in others)
    assert not (tmp_path / ".venv").exists()

"""Prints constraints.txt: the installed version of every direct and indirect dependency.

Left out: CUDA's packages (the CPU build of torch does not want them) and build tags such as +cpu, so that one file pins
both builds.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CUDA = ("nvidia-", "cuda-", "triton")
HEADER = """\
# The tested version of every direct and indirect dependency. Written by `make pins`; installed by `make setup`.
# torch's CUDA build brings its own packages, which follow from its version."""


def installed(requirements: list[str]) -> dict[str, str]:
    """Name -> version of all that these requirements lead to on this machine."""
    waiting = [Requirement(text) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    versions: dict[str, str] = {}
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or name.startswith(CUDA):
            continue
        seen.add((name, extras))
        found = distribution(name)
        versions[name] = found.version.partition("+")[0]
        for text in found.requires or []:
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append(wanted)
    return versions


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    versions = installed([*project["dependencies"], *extras["dev"], *extras["e2e"], *extras["ray"]])
    print(HEADER, *(f"{name}=={versions[name]}" for name in sorted(versions)), sep="\n")

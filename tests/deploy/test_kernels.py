"""The kernels of an image: the same as this machine would compile are among them."""

from __future__ import annotations

from cache import compiler
from deploy.kernels import SOURCES, instruction_sets


def test_this_machines_instructions_are_among_those_that_are_compiled_for() -> None:
    assert compiler._instructions() in list(instruction_sets())


def test_every_kernel_is_compiled() -> None:
    assert all(source.exists() for source in SOURCES)
    root = compiler._HEADERS.parents[2]
    assert set(SOURCES) == {*root.glob("cache/**/*.cpp"), *root.glob("scheduler/**/*.cpp")}

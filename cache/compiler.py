"""Compiling the C++ kernels to shared objects, which are kept in a folder that only this user can write to.

The file's name is a hash of the sources, headers, compiler flags and compiler version. The flags name an instruction
set and not a processor, so an object can be compiled elsewhere (for example when a container image is built) and used
where there is no compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Set
from functools import cache
from pathlib import Path

import torch

from cache.whole_files import CorruptFile, check_private, make_folder, open_file, write_file

# Infinities and NaN stay what they are: nothing here may assume that they do not occur.
_FLAGS = "-std=c++17 -O3 -fPIC -shared -fno-math-errno -fno-trapping-math -ffp-contract=fast -fno-exceptions -fno-rtti"
_INSTRUCTIONS = {  # by what torch has found the processor to have
    "AVX512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma",
    "AVX2": "-mavx2 -mfma -mf16c",
}
_PAIRS = "-mavx512bf16"
_TILES = "-mamx-tile -mamx-bf16"
_MORE = {  # what some of these have besides, by torch's names for it, in the order in which processors got it
    "AVX512": {"avx512_vnni": "-mavx512vnni", "avx512_bf16": _PAIRS, "amx_tile": _TILES},
    "AVX2": {"avx_vnni": "-mavxvnni"},
}
_NEWEST = "-mavxvnni"  # unknown to GCC 10, which can do without
_ARM = {"dot": "dotprod", "bf16": "bf16"}  # what some ARM processors have, by torch's names for it
_HEADERS = Path(__file__).parent / "attention" / "kernels"
_PATIENCE = 300  # seconds that a compiler may take


class NotBuilt(Exception):
    """A shared object is not available; the message is the reason in a few words."""


def build(source: Path) -> Path:
    """The path of the shared object of ``source`` and the headers beside it; compiled now if it does not exist.

    Raises ``NotBuilt``.
    """
    try:
        headers = {*source.parent.glob("*.h"), *_HEADERS.glob("*.h")}
        text = b"".join(path.read_bytes() for path in [source, *sorted(headers)])
        made_of = hashlib.blake2b(text + repr((_FLAGS, _instructions(), platform.machine())).encode(), digest_size=8)
        stem = f"{source.stem}-{made_of.hexdigest()}"
        folder = private_folder()
        compiler = _compiler()
        if compiler is None:
            name = next((path.name for path in sorted(folder.glob(f"{stem}-*.so"))), "")
        else:
            name = f"{stem}-{_version(tuple(compiler))}.so"
            if not (folder / name).exists():
                write_file(folder, name, [_compile([*compiler, *_FLAGS.split(), *_instructions()], source)])
        if not name:
            raise NotBuilt("there is no C++ compiler")
        os.close(open_file(folder, name))
        return folder / name
    except CorruptFile as error:
        raise NotBuilt(f"the compiled file is {error.reason}") from None
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NotBuilt(f"{type(error).__name__} while compiling") from error


def _instructions() -> list[str]:
    capability, features = torch.backends.cpu.get_cpu_capability(), torch.cpu.get_capabilities()
    found = [_INSTRUCTIONS.get(capability, "")]
    found += [flags for feature, flags in _MORE.get(capability, {}).items() if features.get(feature)]
    if platform.machine() in ("aarch64", "arm64"):
        found.append(arm_flags({feature for feature in _ARM if features.get(feature)}))
    return " ".join(found).split()


def arm_flags(features: Set[str]) -> str:
    """The compiler's flags for an ARM processor that has these of ``_ARM``."""
    return "-march=armv8.2-a" + "".join(f"+{_ARM[name]}" for name in sorted(features)) if features else ""


@cache
def has_tiles() -> bool:
    """Whether kernels compiled here multiply tiles of bfloat16 (see ``kernels/tiles.h``). Cached, as it is asked at
    every step.
    """
    return not {_PAIRS, *_TILES.split()}.isdisjoint(_instructions())


def private_folder() -> Path:
    """The folder of the shared objects. Raises ``NotBuilt`` if other users can write to or read it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache").resolve() / "warmturn"
    make_folder(folder)
    try:
        check_private(folder)
    except PermissionError as error:
        raise NotBuilt(str(error.strerror)) from None
    return folder


def _compiler() -> list[str] | None:
    """The command of the C++ compiler: what ``CXX`` says, else the first of the usual names."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    names = wanted[:1] or ["c++", "g++", "clang++"]
    found = next((path for path in map(shutil.which, names) if path), None)
    return [found, *wanted[1:]] if found else None


@cache
def _version(compiler: tuple[str, ...]) -> str:
    told = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=_PATIENCE).stdout
    return hashlib.blake2b(told + shlex.join(compiler[1:]).encode(), digest_size=8).hexdigest()


def _compile(compiler: list[str], source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "object.so"
        command = [*compiler, f"-I{_HEADERS}", str(source), "-o", str(target)]
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_PATIENCE)
        except subprocess.CalledProcessError:
            if _NEWEST not in compiler:
                raise
            return _compile([flag for flag in compiler if flag != _NEWEST], source)
        return target.read_bytes()

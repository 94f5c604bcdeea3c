"""Runs the stages of a Dockerfile in root folders.

A folder made by debootstrap stands for the base image, a chroot for a container. Needs Linux and root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.check_image.dockerfile import Ignored, Instruction, Stage, context_files, read, substituted

BASE = re.compile(r"python:(\d+\.\d+)-slim-([a-z]+)")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PASSED = ("PIP_", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")  # what names a registry
_CLEAN = """// as in the official images: apt keeps no copies
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
"""
_MOUNTS = """set -e
mount --make-rprivate /
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
"""


@dataclass
class Image:
    """What a container is started with."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    folder: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"


class Builder:
    """Builds below ``work``. ``binds``: what of this machine every step sees (packages, certificates), by its place in
    there. ``arguments`` are build arguments."""

    def __init__(
        self, context: Path, work: Path, mirror: str | None, binds: Mapping[str, Path], arguments: Mapping[str, str]
    ) -> None:
        self._context = context
        self._work = work
        self._mirror = mirror
        self._binds = {"/etc/resolv.conf": Path("/etc/resolv.conf"), **binds}
        self._arguments = arguments
        self._ignored = Ignored((context / ".dockerignore").read_text())

    def build(self) -> Image:
        """The image of the last stage. Raises CalledProcessError when a step fails."""
        built: dict[str, Image] = {}
        image = None
        for number, stage in enumerate(read((self._context / "Dockerfile").read_text())):
            image = self._stage(number, stage, built)
            built[stage.name or str(number)] = image
        if image is None:
            raise ValueError("the Dockerfile has no stage")
        return image

    def _stage(self, number: int, stage: Stage, built: Mapping[str, Image]) -> Image:
        root = self._work / f"stage-{number}"
        shutil.rmtree(root, ignore_errors=True)
        above = built.get(stage.base)
        copy_tree(above.root if above else self.base(stage.base), root)
        image = Image(root)
        if above:
            image = Image(root, dict(above.environment), above.folder, above.user, list(above.volumes))
        arguments: dict[str, str] = {}
        for instruction in stage.instructions:
            print(f"image-check: {instruction.keyword} {' '.join(instruction.text.split())[:100]}", flush=True)
            self._step(instruction, image, arguments, built)
        return image

    def base(self, name: str) -> Path:
        """A stand-in for an official image of Python: Debian's own Python of that version, kept for the next time."""
        wanted = BASE.fullmatch(name)
        if wanted is None:
            raise ValueError(f"there is no stand-in for the image {name}")
        version, suite = wanted.groups()
        root = self._work / f"base-{suite}"
        if not (root / ".made").exists():
            shutil.rmtree(root, ignore_errors=True)
            command = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates"]
            run([*command, suite, str(root), *([self._mirror] if self._mirror else [])])
            for link in ("python", "python3"):
                (root / "usr/local/bin" / link).symlink_to("/usr/bin/python3")
            shutil.rmtree(root / "var/cache/apt/archives")
            (root / "etc/apt/apt.conf.d/docker-clean").write_text(_CLEAN)
            (root / ".made").touch()
        if not (root / f"usr/bin/python{version}").exists():
            raise ValueError(f"Debian {suite} has no Python {version}")
        return root

    def _step(
        self, instruction: Instruction, image: Image, arguments: dict[str, str], built: Mapping[str, Image]
    ) -> None:
        text = substituted(instruction.text, {**arguments, **image.environment})
        plain = Instruction(instruction.keyword, text, instruction.flags)
        match instruction.keyword:
            case "ARG":
                for name, value in plain.pairs.items():
                    arguments[name] = self._arguments.get(name, value)
            case "ENV":
                image.environment.update(plain.pairs)
            case "WORKDIR":
                image.folder = text
                (image.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = text
            case "RUN":
                self._run(instruction.text, image, arguments)
            case "COPY":
                self._copy(plain, image, built)
            case "VOLUME":
                image.volumes += plain.words
            case "ENTRYPOINT":
                image.entrypoint, image.command = plain.words, []
            case "CMD":
                image.command = plain.words
            case "HEALTHCHECK":
                image.healthcheck = Instruction("CMD", instruction.text.removeprefix("CMD").strip()).words
            case "STOPSIGNAL":
                image.stop_signal = text

    def _run(self, command: str, image: Image, arguments: Mapping[str, str]) -> None:
        passed = {name: value for name, value in os.environ.items() if name.upper().startswith(PASSED)}
        environment = {**passed, "DEBIAN_FRONTEND": "noninteractive", **image.environment, **arguments}
        places = [(outer, image.root / inner.lstrip("/")) for inner, outer in self._binds.items() if outer.exists()]
        made = [place for outer, place in places if _mount_point(outer, place)]
        script = _MOUNTS + "".join(f'mount --bind "{outer}" "{place}"\n' for outer, place in places)
        script += 'exec chroot "$0" /usr/bin/env -i "$@"'
        pairs = [f"{name}={value}" for name, value in environment.items()]
        inside = ["-C", image.folder, *pairs, "/bin/sh", "-c", command]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, str(image.root)]
        run([*unshare, *inside])
        for place in made:
            place.rmdir() if place.is_dir() else place.unlink()

    def _copy(self, instruction: Instruction, image: Image, built: Mapping[str, Image]) -> None:
        *sources, target = instruction.words
        place = image.root / os.path.normpath(os.path.join(image.folder, target)).lstrip("/")
        if "from" in instruction.flags:
            for source in sources:
                copy_tree(built[instruction.flags["from"]].root / source.lstrip("/"), place)
        else:
            for source in sources:
                for path in context_files(self._context, self._ignored, source):
                    inner = path.relative_to(source) if (self._context / source).is_dir() else path.name
                    (place / inner).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(self._context / path, place / inner)
        if "chown" in instruction.flags:
            run(["chown", "-R", instruction.flags["chown"], str(place)])


def copy_tree(source: Path, target: Path) -> None:
    """What is in ``source`` into ``target``, with owners, modes and links as they are."""
    target.mkdir(parents=True, exist_ok=True)
    run(["cp", "-a", "--reflink=auto", f"{source}/.", str(target)])


def run(command: Sequence[str]) -> None:
    """Run a command whose output belongs to ours. Raises CalledProcessError."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _mount_point(outer: Path, place: Path) -> bool:
    """Make a place for a mount where there is none; whether that was needed."""
    if place.exists():
        return False
    if outer.is_dir():
        place.mkdir(parents=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    return True

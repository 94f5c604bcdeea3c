"""What reads and runs a Dockerfile without an engine: as much of it as needs no root."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from deploy.check_image.builder import Builder
from deploy.check_image.dockerfile import Ignored, Instruction, read, substituted

TEXT = r"""
# a comment
FROM debian:12 AS build
ARG VERSION=1.0
ENV A=1 \
    # a comment within
    B="two words"
WORKDIR /build
COPY one.txt folder ./
COPY folder inner/

FROM build
COPY --from=build --chown=1:2 /build /app
HEALTHCHECK --timeout=5s CMD ["a", "b c"]
CMD ["serve"]
"""


def test_a_dockerfile_is_read_into_stages() -> None:
    build, last = read(TEXT)
    assert (build.base, build.name, last.base, last.name) == ("debian:12", "build", "build", None)
    assert [each.keyword for each in build.instructions] == ["ARG", "ENV", "WORKDIR", "COPY", "COPY"]
    assert build.instructions[1].pairs == {"A": "1", "B": "two words"}
    assert last.instructions[0] == Instruction("COPY", "/build /app", {"from": "build", "chown": "1:2"})
    assert last.instructions[2].words == ["serve"]


@pytest.mark.parametrize("text", ["RUN true", "FROM a\nONBUILD RUN true", "FROM a\nADD b c"])
def test_what_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"before FROM|not understood"):
        read(text)


def test_variables_are_replaced() -> None:
    assert substituted("$A/${B}:$NONE", {"A": "1", "B": "2"}) == "1/2:"


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("README.md", True),
        ("server", False),
        ("server/app.py", False),
        ("server/routes/__pycache__/chat.pyc", True),
        ("deploy", True),
        ("deploy/kernels.py", False),
        ("deploy/other.py", True),
        ("servers/app.py", True),
    ],
)
def test_the_last_pattern_that_matches_decides(path: str, ignored: bool) -> None:
    assert Ignored("# all\n*\n!server\n!deploy/kernels.py\n**/__pycache__\n")(PurePosixPath(path)) is ignored


def test_stages_are_folders_that_are_copied_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, work, base = tmp_path / "context", tmp_path / "work", tmp_path / "base"
    (context / "folder" / "__pycache__").mkdir(parents=True)
    (base / "usr").mkdir(parents=True)
    work.mkdir()
    for name in ("one.txt", "two.txt", "folder/three.txt", "folder/__pycache__/four.txt"):
        (context / name).write_text(name)
    (context / "Dockerfile").write_text(TEXT.replace(" --chown=1:2", ""))
    (context / ".dockerignore").write_text("**/__pycache__")
    monkeypatch.setattr(Builder, "base", lambda self, name: base)
    image = Builder(context, work, None, {}, {"VERSION": "2.0"}).build()
    below = {str(path.relative_to(image.root)) for path in image.root.rglob("*") if path.is_file()}
    copied = {"one.txt", "three.txt", "inner/three.txt"}
    assert below == {f"{folder}/{name}" for folder in ("build", "app") for name in copied}
    assert (image.environment["B"], image.folder, image.command) == ("two words", "/build", ["serve"])
    assert image.healthcheck == ["a", "b c"]

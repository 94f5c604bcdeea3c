"""The modules of the page as one: a browser that asks for each of them waits for most of them in a queue.

What they have in common makes it simple, and tests hold it: imports stand at the beginning, exports have names and are
never assigned again, and no two modules import each other.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "ui"
OTHERS = "vendor/"  # what stays in files of its own
IMPORT = re.compile(r'^import (?:\{([^}]*)\}|(\w+)) from "\./([^"]+)";', re.MULTILINE)
EXPORT = re.compile(r"^export (?:\{([^}]*)\};|(?=(?:async function\*?|function|const|class) (\w+)))", re.MULTILINE)


@cache
def source(name: str) -> str:
    return (FOLDER / name).read_text()


def imported(name: str) -> list[str]:
    """A module and what it imports, by their names: each stands behind all that it imports."""
    found: dict[str, None] = {}

    def add(name: str) -> None:
        if name not in found and not name.startswith(OTHERS):
            for _, _, other in IMPORT.findall(source(name)):
                add(other)
        found[name] = None

    add(name)
    return [*found]


def joined(name: str) -> str:
    """A module that stands in the folder of this one and does what it does, with all that it imports."""
    names = imported(name)
    others = [other for other in names if other.startswith(OTHERS)]
    lines = [f'import * as $other{number} from "./{other}";' for number, other in enumerate(others)]
    places = {other: f"$other{number}" for number, other in enumerate(others)}
    own = [one for one in names if one not in places]
    places |= {one: f'$modules["{one}"]' for one in own}
    return "\n".join([*lines, "const $modules = {};", *(_wrapped(one, places) for one in own)]) + "\n"


def _wrapped(name: str, places: dict[str, str]) -> str:
    exports: list[str] = []

    def bind(found: re.Match[str]) -> str:
        names, default, other = found.groups()
        if default:
            return f"const {default} = {places[other]}.default;"
        return f"const {{{names.replace(' as ', ': ')}}} = {places[other]};"

    def note(found: re.Match[str]) -> str:
        exports.extend(one.strip() for one in (found[1] or found[2]).split(","))
        return ""

    text = EXPORT.sub(note, IMPORT.sub(bind, source(name)))
    return f'$modules["{name}"] = await (async () => {{\n{text}\nreturn {{ {", ".join(exports)} }};\n}})();'

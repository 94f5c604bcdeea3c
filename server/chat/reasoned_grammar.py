"""Puts reasoning in front of the grammar of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from server.chat.call_grammar import until_mark
from server.constraints.grammars import HEAD


def grammar_behind_reasoning(answer: str, closing: str, special: Mapping[str, int]) -> str:
    """The grammar of a reply that begins within reasoning, which ends with the text ``closing``; then follows what
    matches ``answer``, a grammar of ``server.constraints.grammars``. ``special``: see ``call_grammar``.
    """
    rules = ["start: thought SPACE? @answer", *until_mark("thought", closing, special)]
    rules += ["ANY: /(?s:.*)/", r"SPACE: /\s{1,8}/"]
    (inner,) = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    return json.dumps({"grammars": [{"lark_grammar": HEAD + "\n".join(rules)}, {**inner, "name": "answer"}]})

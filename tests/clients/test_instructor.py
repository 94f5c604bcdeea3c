"""instructor: answers as pydantic models, by each of its ways to get them."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pytest
from conftest import KEY
from pydantic import BaseModel
from server_process import ServerProcess

ASKED: Any = [{"role": "user", "content": "Tell me of a person."}]


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["good", "bad"]
    siblings: list[str]


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA])
def test_a_model_comes_back(server: ServerProcess, terse: dict[str, int], mode: instructor.Mode) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as plain:
        ai = instructor.from_openai(plain, mode=mode)
        person = ai.chat.completions.create(
            model="m", messages=ASKED, response_model=Person, max_retries=0, temperature=0, logit_bias=terse
        )
    assert isinstance(person, Person)


def test_partial_models_stream(server: ServerProcess, terse: dict[str, int]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as plain:
        ai = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        people: Any = ai.chat.completions.create_partial(
            model="m", messages=ASKED, response_model=Person, max_retries=0, temperature=0, logit_bias=terse
        )
        *_, last = people
    assert last.age is not None

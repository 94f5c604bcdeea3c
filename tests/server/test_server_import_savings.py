"""What `warmturn serve` does not import, and that whoever wants it nevertheless gets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from sqlalchemy.dialects import postgresql

from server.log import tables

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parents[2]

START = """
import json, sys
from server.server_import_savings import leave_out_unused
leave_out_unused()
import server.serve
from server.instance import import_app, import_parts
import_parts()
import_app()
"""
IMPORTED = (
    START
    + """
from pathlib import Path

status = Path("/proc/self/status")
memory = int(status.read_text().split("RssAnon:")[1].split()[0]) if status.exists() else None
heavy = ("torch", "transformers", "pydantic.v1.main", "watchfiles", "multiprocessing.context", "llguidance",
    "sqlalchemy.dialects.postgresql", "psycopg", "opentelemetry.sdk", "click", "numpy")
there = [name for name in heavy if name in sys.modules]

from server.schemas.requests import ChatRequest
from server.schemas.strict import validate

before = ChatRequest.__pydantic_complete__
asked = validate(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5})
print(json.dumps([memory, there, before, ChatRequest.__pydantic_complete__, asked.temperature]))
"""
)
MOST_OWN = 68_000  # kB: before a model is there; shared libraries' files come on top
WANTED = (
    START
    + """
import fastapi.openapi.models as models
from fastapi import FastAPI
from pydantic import BaseModel

class Mine(BaseModel):
    number: int

before = [models.OpenAPI.__pydantic_complete__, models.Schema.__pydantic_complete__]
app = FastAPI(title="wanted")

@app.post("/x")
def x(body: Mine) -> Mine:
    return body

document = app.openapi()
from pydantic.v1 import validator
from uvicorn.supervisors import BaseReload
print(json.dumps([before, Mine.__pydantic_complete__, sorted(document["components"]["schemas"]),
    models.OpenAPI.__pydantic_complete__, validator.__module__, BaseReload.__module__]))
"""
)


def run(program: str) -> Any:
    """What a program prints as JSON, in a fresh interpreter."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_server_on_sqlite_without_grammars_imports_little_and_builds_schemas_at_first_use() -> None:
    memory, there, *schema = run(IMPORTED)
    assert there == []
    assert schema == [False, True, 0.5]
    assert memory is None or 0 < memory < MOST_OWN  # it is read from Linux's /proc


def test_whoever_asks_for_it_gets_it() -> None:
    before, mine, schemas, after, validator, reload = run(WANTED)
    assert (before, after) == ([False, False], True)
    assert mine
    assert {"Mine", "HTTPValidationError"} <= set(schemas)
    assert (validator, reload) == ("pydantic.v1.class_validators", "uvicorn.supervisors.basereload")


def test_indexes_are_partial_on_postgresql_too() -> None:
    tables.define_for_postgresql()
    for index, condition in ((tables.running_index, "status IN"), (tables.chats_index, "substr(key")):
        made = str(sql.schema.CreateIndex(index).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]
        assert f"WHERE {condition}" in made

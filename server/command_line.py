"""The command line, made from the fields of ``server.config``: a flag and an environment variable per field."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsError

from server import __version__
from server.config import ChatConfig, ClientConfig, ServeConfig, UsageError
from server.session_verbs import JSON, VERBS, SessionsCommand

COMMANDS: dict[str, tuple[type[BaseSettings], str]] = {
    "serve": (ServeConfig, "Serve a model over HTTP, as the OpenAI API, with one KV cache per session."),
    "chat": (ChatConfig, "Chat in the terminal with a running server. Ctrl-C stops a reply, Ctrl-D leaves."),
    "sessions": (ClientConfig, "List, show, fork, rewind, export and delete the sessions of a running server."),
}


def parse(arguments: Sequence[str]) -> ServeConfig | ChatConfig | SessionsCommand:
    """What was asked for, with its configuration. Raises UsageError; ``--help`` and ``--version`` exit."""
    given = vars(_parser().parse_args(arguments))
    config, _ = COMMANDS[given.pop("command")]
    verb = given.pop("verb", None)
    if verb is None:
        parsed = _configured(config, given)
        assert isinstance(parsed, ServeConfig | ChatConfig)
        return parsed
    settings = {name: given.pop(name) for name in config.model_fields if name in given}
    parsed = _configured(config, settings)
    assert isinstance(parsed, ClientConfig)
    return SessionsCommand(parsed, verb, given)


def _configured(config: type[BaseSettings], given: dict[str, Any]) -> BaseSettings:
    try:
        return config(**given)
    except ValidationError as error:
        raise UsageError(_explain(error, config, given)) from None
    except SettingsError as error:
        raise UsageError(str(error).splitlines()[0]) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="warmturn",
        description="Text generation over HTTP with one persistent KV cache per session.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"warmturn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (config, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if config is ClientConfig:
            _add_verbs(command, config)
        else:
            for field, info in config.model_fields.items():
                _add(command, config, field, info)
    return parser


def _add_verbs(parser: argparse.ArgumentParser, config: type[BaseSettings]) -> None:
    """One command per verb, each with the flags of ``config`` behind its own arguments."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (summary, arguments) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        for argument in (*arguments, JSON):
            argument.add_to(verb)
        for field, info in config.model_fields.items():
            _add(verb, config, field, info)


def _add(parser: argparse.ArgumentParser, config: type[BaseSettings], name: str, field: FieldInfo) -> None:
    """One field as an argument. Values stay text here: the model converts and checks them, as it does the
    environment's."""
    extra: Any = field.json_schema_extra or {}
    choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else None
    options: dict[str, Any] = {
        "default": argparse.SUPPRESS,  # what is not given comes from the environment or the field
        "metavar": "|".join(choices) if choices else extra.get("metavar", name.upper()),
        "help": f"{field.description} (default: {extra.get('default', field.default)}; "
        f"environment: {environment_variable(config, name)})".replace("%", "%%"),
    }
    if choices:
        options["choices"] = choices
    if typing.get_origin(field.annotation) in (dict, list):
        options["action"] = "append"
    if extra.get("positional"):
        parser.add_argument(name, nargs="?", **options)
    else:
        parser.add_argument(flag(name), dest=name, **options)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def environment_variable(config: type[BaseSettings], name: str) -> str:
    """The environment variable of a field."""
    return f"{config.model_config['env_prefix']}{name}".upper()


def _explain(error: ValidationError, config: type[BaseSettings], given: dict[str, Any]) -> str:
    """The first fault, said of the flag or the variable that it came from."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(fault["loc"][0])
    extra: Any = config.model_fields[name].json_schema_extra or {}
    asked = (extra.get("metavar", name.upper()) if extra.get("positional") else flag(name)) if name in given else None
    message = fault["msg"].removeprefix("Value error, ")
    return f"{asked or environment_variable(config, name)}: {message[0].lower()}{message[1:]}"

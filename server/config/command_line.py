"""Parses the command line and the environment: one flag and one environment variable per field of the options."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsError

from server import __version__
from server.config import help_text
from server.config.bench_options import BenchConfig
from server.config.client_options import ChatConfig, ClientConfig
from server.config.cluster_options import ClusterConfig
from server.config.connect_options import ConnectConfig
from server.config.doctor_options import DoctorConfig
from server.config.environment import misspelt
from server.config.keys_options import KeysConfig
from server.config.serve_options import ServeConfig
from server.config.sessions_options import JSON, VERBS, SessionsCommand
from server.config.usage_error import UsageError

COMMANDS: dict[str, tuple[type[BaseSettings], str]] = {
    "serve": (ServeConfig, "Serve a model over HTTP, as the OpenAI API, with one KV cache per session."),
    "chat": (ChatConfig, "Chat in the terminal with a running server. Ctrl-C stops a reply, Ctrl-D leaves."),
    "sessions": (ClientConfig, "List, show, fork, rewind, export and delete the sessions of a running server."),
    "connect": (ConnectConfig, "Print or write the settings of a coding agent for a running server."),
    "keys": (KeysConfig, "Add, list and revoke API keys in a file that running servers read again."),
    "cluster": (ClusterConfig, "Serve a model with several servers that share their sessions, on Ray Serve."),
    "doctor": (DoctorConfig, "Look for what keeps a server from starting or makes it slow, and say what to do."),
    "bench": (BenchConfig, "Measure multi-turn chats on this machine or on any server of OpenAI's API."),
}
FAULTS = {  # pydantic's, in words for people
    "byte_size": "expected a size in bytes, as 512M, 8GB or 2GiB",
    "byte_size_unit": "expected a size in bytes, as 512M, 8GB or 2GiB",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a smaller number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "finite_number": "expected a number that is not infinite",
    "bool_parsing": "expected true or false",
    "string_too_short": "cannot be empty",
    "string_pattern_mismatch": "does not have the form that it must have",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected {ge} or more",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected {le} or less",
    "literal_error": "expected {expected}",
}
LONGEST_LINE = 80  # columns of a page of help

Settings = TypeVar("Settings", bound=BaseSettings)
Command = ServeConfig | ChatConfig | ConnectConfig | KeysConfig | SessionsCommand | DoctorConfig | BenchConfig


def parse(arguments: Sequence[str]) -> Command:
    """What was asked for, with its configuration. Raises UsageError; ``--help`` and ``--version`` exit."""
    ours, behind = _split_arguments(list(arguments))
    given = vars(_parser().parse_args(ours))
    if fault := misspelt(os.environ, _variables()):
        raise UsageError(fault)
    config, _ = COMMANDS[given.pop("command")]
    if isinstance(named := given.get("model"), list):
        if not named:
            del given["model"]
        else:
            given["model"] = named[0]
            given["also"] = [*named[1:], *given.get("also", [])]
    verb = given.pop("verb", None)
    if verb is None:
        if behind:
            given["serve_flags"] = behind
        parsed = configure(config, given)
        assert isinstance(parsed, ServeConfig | ChatConfig | ConnectConfig | KeysConfig | BenchConfig)
        return parsed
    settings = {name: given.pop(name) for name in config.model_fields if name in given}
    parsed = configure(config, settings)
    assert isinstance(parsed, ClientConfig)
    return SessionsCommand(parsed, verb, given)


def _variables() -> dict[str, str]:
    """Every variable of every command, and the flag that it stands for."""
    return {
        environment_variable(config, name): flag(name, field)
        for config, _ in COMMANDS.values()
        for name, field in config.model_fields.items()
    }


def _split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind ``--``, where that is for another command."""
    if arguments[:1] != ["bench"] or "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def configure(config: type[Settings], given: dict[str, Any]) -> Settings:
    """``config`` over the fields ``given``; the others come from the environment. Raises UsageError."""
    try:
        return config(**given)
    except ValidationError as error:
        raise UsageError(_explain(error, config, given)) from None
    except SettingsError as error:
        raise UsageError(str(error).splitlines()[0]) from None


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Page, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class _Page(argparse.RawDescriptionHelpFormatter):
    """A page of help in 80 columns, or less where the terminal has less; words with hyphens stay whole."""

    def __init__(self, prog: str) -> None:
        columns = min(LONGEST_LINE, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=24, width=columns - 1)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="warmturn",
        usage="warmturn COMMAND [OPTIONS]",
        description="Text generation over HTTP with one persistent KV cache per session.",
        epilog=help_text.PROGRAM,
    )
    parser.add_argument("--version", action="version", version=f"warmturn {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, prog="warmturn"
    )
    for name, (config, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, epilog=help_text.ENDS.get(name))
        if config is ClientConfig:
            command.usage = f"warmturn {name} VERB [OPTIONS]"
            _add_verbs(command, config)
        else:
            _add_fields(command, config)
    return parser


def _add_fields(parser: argparse.ArgumentParser, config: type[BaseSettings]) -> None:
    """The fields of a command, in groups where they are those of `warmturn serve`. The doctor has these too, and leaves
    it to that page to describe them."""
    groups: dict[str, argparse._ActionsContainer] = {}
    for name in sorted(config.model_fields, key=help_text.place):
        title = help_text.group(name) if issubclass(config, ServeConfig) else None
        hidden = config is DoctorConfig and name not in DoctorConfig.__annotations__
        if title is None or hidden:
            _add(parser, config, name, hidden=hidden)
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title], config, name)
    extras: list[Any] = [field.json_schema_extra or {} for field in config.model_fields.values()]
    positionals = "".join(
        f" [{extra['metavar']}]" + "..." * bool(extra.get("several")) for extra in extras if extra.get("positional")
    )
    behind = "".join(f" [{extra['metavar']}]" for extra in extras if extra.get("behind"))
    parser.usage = f"{parser.prog} [OPTIONS]{positionals}{behind}"


def _add_verbs(parser: argparse.ArgumentParser, config: type[BaseSettings]) -> None:
    """One command per verb, each with the flags of ``config`` behind its own arguments."""
    for field in config.model_fields:
        _add(parser, config, field, hidden=True)  # also in front of the verb; its own page describes them
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True, prog=parser.prog)
    for name, (summary, arguments) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary, epilog=help_text.VERB)
        for argument in (*arguments, JSON):
            argument.add_to(verb)
        for field in config.model_fields:
            _add(verb, config, field)


def _add(parser: argparse._ActionsContainer, config: type[BaseSettings], name: str, *, hidden: bool = False) -> None:
    """One field as an argument. Values stay text here: the model converts and checks them, as it does the
    environment's."""
    field = config.model_fields[name]
    extra: Any = field.json_schema_extra or {}
    if extra.get("behind"):
        return
    choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else None
    options: dict[str, Any] = {
        "default": argparse.SUPPRESS,  # what is not given comes from the environment or the field
        "help": f"{field.description} (default: {extra.get('default', field.default)}; "
        f"environment: {environment_variable(config, name)})".replace("%", "%%"),
    }
    if hidden:
        options["help"] = argparse.SUPPRESS
    if field.annotation is bool:
        options |= {"action": "store_true"}
    else:
        options["metavar"] = "|".join(choices) if choices else extra.get("metavar", name.upper())
    if choices:
        options["choices"] = choices
    if typing.get_origin(field.annotation) in (dict, list) and not extra.get("commas"):
        options["action"] = "append"
    if extra.get("positional"):
        parser.add_argument(name, nargs="*" if extra.get("several") else "?", **options)
    else:
        parser.add_argument(flag(name, field), dest=name, **options)


def flag(name: str, field: FieldInfo | None = None) -> str:
    extra: Any = (field.json_schema_extra if field is not None else None) or {}
    return str(extra.get("flag", "--" + name.replace("_", "-")))


def environment_variable(config: type[BaseSettings], name: str) -> str:
    return f"{config.model_config['env_prefix']}{name}".upper()


def _explain(error: ValidationError, config: type[BaseSettings], given: dict[str, Any]) -> str:
    """The first fault, said of the flag or the variable that it came from."""
    fault = error.errors(include_url=False, include_input=False)[0]
    name = str(fault["loc"][0])
    field = config.model_fields[name]
    extra: Any = field.json_schema_extra or {}
    asked = (
        (extra.get("metavar", name.upper()) if extra.get("positional") else flag(name, field))
        if name in given
        else None
    )
    said = extra.get("form") if fault["type"] == "string_pattern_mismatch" else FAULTS.get(fault["type"])
    limits = {
        key: f"{value:.12g}" if isinstance(value, float) else value for key, value in fault.get("ctx", {}).items()
    }
    message = fault["msg"].removeprefix("Value error, ") if said is None else str(said).format(**limits)
    return f"{asked or environment_variable(config, name)}: {message[0].lower()}{message[1:]}"

"""The configuration: one field is a flag, an environment variable and a line of help, with the same checks."""

import re
from pathlib import Path

import pytest

from scheduler.engine_config import EngineConfig
from server.config.bench_options import BenchConfig
from server.config.client_options import ChatConfig
from server.config.command_line import COMMANDS, environment_variable, flag, parse
from server.config.doctor_options import DoctorConfig
from server.config.engine_options import engine_config
from server.config.serve_options import DEMO_FOLDER, ServeConfig
from server.config.sessions_options import SessionsCommand
from server.config.usage_error import UsageError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, _ in COMMANDS.values():
        for name in config.model_fields:
            monkeypatch.delenv(environment_variable(config, name), raising=False)


def serve(*arguments: str) -> ServeConfig:
    config = parse(["serve", *arguments])
    assert isinstance(config, ServeConfig)
    return config


def chat(*arguments: str) -> ChatConfig:
    config = parse(["chat", *arguments])
    assert isinstance(config, ChatConfig)
    return config


def test_the_defaults_serve_the_demo_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    config = serve()
    assert (config.host, config.port, config.api_key) == ("127.0.0.1", 8000, {})
    assert config.data_dir == Path("/data/warmturn")
    assert (config.name, config.source) == ("demo", str(DEMO_FOLDER))
    assert (DEMO_FOLDER / "config.json").is_file()
    assert engine_config(config) == EngineConfig(
        address="", model=str(DEMO_FOLDER), verdicts="/data/warmturn/verdicts", kv_folder="/data/warmturn/kv"
    )
    assert (config.durability, config.database, config.drain_seconds) == ("process", None, 30.0)
    assert (config.remote, config.max_capsule) == (None, 4 * 2**30)


def test_the_data_dir_without_xdg_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for unusable in ("", "not/absolute"):
        monkeypatch.setenv("XDG_DATA_HOME", unusable)
        assert serve().data_dir == Path("/home/someone/.local/share/warmturn")


def test_every_value_reaches_the_engine() -> None:
    values = "--device cpu --dtype float32 --max-context 100 --kv-memory 1M --host-memory 0"
    limits = "--max-running 3 --max-step-tokens 64 --max-queued 5 --tenant-share 0.25"
    tiers = "--disk-space 2G --disk-floor 1M --remote s3://bucket/kv --remote-space 8G --kv-at-rest int8 --kv-dtype fp8"
    line = f"org/model {values} {limits} {tiers} --data-dir /d"
    assert engine_config(serve(*line.split())) == EngineConfig(
        address="",
        model="org/model",
        device="cpu",
        dtype="float32",
        max_context=100,
        kv_memory=1_000_000,
        host_memory=0,
        max_running=3,
        max_step_tokens=64,
        max_queued=5,
        verdicts="/d/verdicts",
        kv_folder="/d/kv",
        disk_space=2 * 10**9,
        disk_floor=10**6,
        remote="s3://bucket/kv",
        remote_space=8 * 10**9,
        kv_at_rest="int8",
        kv_dtype="fp8",
        tenant_share=0.25,
    )
    assert engine_config(serve("--disk-space", "0")).disk_space == 0  # not the default


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 2**20), ("512M", 512_000_000), ("4G", 4_000_000_000), ("4GiB", 4 * 2**30), ("1.5kb", 1500)],
)
def test_memory_takes_units(text: str, size: int) -> None:
    assert serve("--kv-memory", text).kv_memory == size
    assert serve("--host-memory", text).host_memory == size


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMTURN_PORT", "1234")
    monkeypatch.setenv("WARMTURN_MODEL", "org/model")
    monkeypatch.setenv("WARMTURN_API_KEY", "ann=k1,bob=k2")
    config = serve()
    assert (config.port, config.model, config.api_key) == (1234, "org/model", {"ann": "k1", "bob": "k2"})
    config = serve("--port", "99", "other", "--api-key", "eve=a=b")
    assert (config.port, config.model, config.api_key) == (99, "other", {"eve": "a=b"})


OF_ITS_OWN = {
    "doctor": set(DoctorConfig.model_fields) - set(ServeConfig.model_fields) | {"model"}
}  # the rest is serve's
FIELDS = [(c, f) for c, (m, _) in COMMANDS.items() for f in m.model_fields if f in OF_ITS_OWN.get(c, {f})]


@pytest.mark.parametrize(("command", "field"), FIELDS)
def test_every_field_has_a_flag_a_variable_and_a_sentence(
    command: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse([command, *(["list"] if command == "sessions" else []), "--help"])
    assert left.value.code == 0
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    config, _ = COMMANDS[command]
    info = config.model_fields[field]
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    if not extra.get("behind"):
        assert f"environment: {environment_variable(config, field)})" in told
    place = extra.get("positional") or extra.get("behind")
    assert (f"[{extra['metavar']}]" if place else f"{flag(field, info)} ") in told


def test_the_models_name_in_the_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert serve("org/model").name == "org/model"
    assert serve("org/model", "--served-model-name", "gpt").name == "gpt"
    for given in ("tiny", "./tiny", str(tmp_path / "tiny")):
        config = serve(given)
        assert (config.name, config.source) == ("tiny", str(tmp_path / "tiny"))
    (tmp_path / "demo").mkdir()
    assert serve("demo").source == str(DEMO_FOLDER)
    assert serve("./demo").source == str(tmp_path / "demo")


def test_a_chat_begins_its_own_session_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat().session != chat().session
    assert chat("--session", "mine").session == "mine"
    monkeypatch.setenv("WARMTURN_API_KEY", "ann=k1")  # the server's keys are not the client's
    assert chat().api_key is None
    monkeypatch.setenv("WARMTURN_CHAT_API_KEY", "k1")
    assert chat().api_key == "k1"


def test_a_doctor_is_told_what_a_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "org/model --kv-memory 1M --port 9 --api-key ann=k1"
    config = parse(["doctor", *line.split(), "--json"])
    assert isinstance(config, DoctorConfig)
    assert (engine_config(config), config.port, config.api_key) == (
        engine_config(serve(*line.split())),
        9,
        {"ann": "k1"},
    )
    assert (config.with_model, config.as_json) == (True, True)
    alone = parse(["doctor"])
    assert isinstance(alone, DoctorConfig)
    assert (alone.with_model, alone.as_json) == (False, False)
    monkeypatch.setenv("WARMTURN_MODEL", "org/model")
    named = parse(["doctor"])
    assert isinstance(named, DoctorConfig)
    assert (named.with_model, named.source) == (True, "org/model")


def test_what_a_bench_is_told() -> None:
    config = parse("bench org/model --sessions 1,8 --history 500 --threads 2 -- --device cpu --port 5".split())
    assert isinstance(config, BenchConfig)
    assert (config.target, config.is_url, config.sessions, config.history) == ("org/model", False, [1, 8], [500])
    assert config.serve_flags == ["--device", "cpu", "--port", "5"]
    config = parse("bench https://host/v1 --api-key k1 --pid 7".split())
    assert isinstance(config, BenchConfig)
    assert (config.is_url, config.api_key, config.pid, config.sessions) == (True, "k1", 7, [1, 4, 16])
    assert "k1" not in repr(config)


def test_a_database_is_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMTURN_DATABASE", "postgresql://ann:secret@host/name")
    config = serve("--remote", "s3://key:secret@bucket/kv")
    assert config.database == "postgresql://ann:secret@host/name"
    assert "secret" not in f"{config!r} {config!s}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "COMMAND"),
        ("fly", "invalid choice: 'fly'"),
        ("serve --prot 1", "unrecognized arguments: --prot"),
        ("serve --por 1", "unrecognized arguments: --por"),
        ("serve --port", "--port: expected one argument"),
        ("serve --port x", "--port: expected a whole number"),
        ("serve --port 65536", "--port: expected 65535 or less"),
        ("serve --device tpu", "--device: invalid choice"),
        ("serve --dtype int4", "--dtype: invalid choice"),
        ("serve --kv-memory lots", "--kv-memory: expected a size in bytes, as 512M"),
        ("serve --kv-memory -1", "--kv-memory: "),
        ("serve --max-running 0", "--max-running: expected 1 or more"),
        ("serve --max-context 1.5", "--max-context: expected a whole number"),
        ("serve --response-template /nowhere.json", "--response-template: "),
        ("serve --generation-config /nowhere.json", "--generation-config: model, openai or a JSON file is needed"),
        ("serve --drain-seconds -1", "--drain-seconds: "),
        ("serve --drain-seconds inf", "--drain-seconds: "),
        ("serve --durability fsync", "--durability: invalid choice"),
        ("serve --database=", "--database: "),
        ("serve --kv-dtype int4", "--kv-dtype: invalid choice"),
        ("serve --kv-at-rest int4", "--kv-at-rest: invalid choice"),
        ("serve --tenant-share 0", "--tenant-share: expected more than 0"),
        ("serve --tenant-share 1.1", "--tenant-share: expected 1 or less"),
        ("serve --remote secret", "--remote: an fsspec URL is needed"),
        ("serve --max-capsule 0", "--max-capsule: "),
        ("serve ./nowhere", "MODEL: there is no such folder"),
        ("serve /nowhere", "MODEL: there is no such folder"),
        ("serve --api-key secret", "--api-key: expected NAME=KEY"),
        ("serve --api-key =secret", "--api-key: expected NAME=KEY"),
        ("serve --api-key ann=", "--api-key: expected NAME=KEY"),
        ("serve --api-key a=secret --api-key a=other", "--api-key: the name a or its key occurs twice"),
        ("serve --api-key a=secret --api-key b=secret", "--api-key: the name b or its key occurs twice"),
        ("doctor --port x", "--port: expected a whole number"),
        ("doctor ./nowhere", "MODEL: there is no such folder"),
        ("bench --sessions 1,x", "--sessions: "),
        ("bench --sessions 0", "--sessions: expected 1 or more"),
        ("bench --turns 0", "--turns: expected 1 or more"),
        ("bench --kv-memory 1G", "unrecognized arguments: --kv-memory"),
        ("bench --session-header a:b", "--session-header: "),
        ("serve ./nowhere.gguf", "MODEL: there is no such file"),
        ("serve --kv-memory 5QB", "--kv-memory: expected a size in bytes, as 512M"),
        ("serve --database=", "--database: cannot be empty"),
        ("bench --url localhost", "--url: expected an address, as http://127.0.0.1:8000"),
        ("bench --url http://localhost other/model", "--url: cannot be used together with URL|MODEL"),
        ("sessions --url localhost list", "--url: expected an address"),
        ("chat --url localhost:8000", "--url: expected an address"),
        ("chat --api-key é", "--api-key: expected ASCII characters that are no spaces"),
        ("chat --session a/b", "--session: expected 1 to 128 letters, digits and . _ : @ -"),
        ("chat --temperature nan", "--temperature: "),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_flag(line: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(line.split())
    told = str(refusal.value)
    assert message in told
    assert "\n" not in told
    assert "secret" not in told


@pytest.mark.parametrize(("variable", "value"), [("PORT", "tcp://10.0.0.1:80"), ("DEVICE", "tpu"), ("API_KEY", "")])
def test_a_wrong_variable_is_named(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"WARMTURN_{variable}", value)
    with pytest.raises(UsageError, match=f"^WARMTURN_{variable}: "):
        serve()


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["bench"], ["doctor"], ["sessions", "list"], ["cluster"]])
@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("WARMTURN_API_KEYS", "WARMTURN_API_KEY (--api-key)"),
        ("warmturn_kv_memry", "WARMTURN_KV_MEMORY (--kv-memory)"),
        ("WARMTURN_CHAT_ULR", "WARMTURN_CHAT_URL (--url)"),
        ("WARMTURN_Q", "--help"),
    ],
)
def test_a_misspelt_variable_is_refused_and_the_nearest_named(
    command: list[str], variable: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "me=secret")
    with pytest.raises(UsageError, match=rf"^{variable}: .*{re.escape(near)}") as fault:
        parse(command)
    assert "secret" not in str(fault.value)


@pytest.mark.parametrize(
    "variable",
    ["WARMTURN_BENCH_MODEL", "WARMTURN_CHAT_URL", "WARMTURN_REMOTE", "WARMTURN_SERVICE_HOST", "WARMTURN_PORT_8000_TCP"],
)
def test_variables_of_other_commands_and_of_kubernetes_are_no_faults(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://there:1")
    assert serve().port == 8000
    assert chat()


def test_the_address_of_a_server_stands_where_people_put_it() -> None:
    address = "http://10.0.0.1:8000"
    for line in (f"sessions --url {address} list", f"sessions list --url {address}"):
        command = parse(line.split())
        assert isinstance(command, SessionsCommand)
        assert (command.config.url, command.verb) == (address, "list")
    command = parse(f"sessions --api-key k --url http://h list --url {address}".split())
    assert isinstance(command, SessionsCommand)
    assert (command.config.url, command.config.api_key) == (address, "k"), "what stands last holds"
    for line in (f"bench --url {address}", f"bench {address}", f"bench --url {address} {address}"):
        config = parse(line.split())
        assert isinstance(config, BenchConfig)
        assert (config.subject, config.is_url) == (address, True)
    chat = parse(f"chat --url {address}".split())
    assert isinstance(chat, ChatConfig)
    assert chat.url == address


def test_a_draft_model_that_would_not_draft_is_refused() -> None:
    with pytest.raises(UsageError, match="--draft-model: it drafts with --speculate auto only"):
        engine_config(serve("--draft-model", "small"))
    assert engine_config(serve("--draft-model", "small", "--speculate", "auto")).draft_model == "small"

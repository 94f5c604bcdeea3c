"""A real server as its watchers see it: its metrics held against dashboard, rules and page; its log; its spans."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from otlp_collector import Collector
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "warmturn.json").read_text())
SERVICE_MONITOR = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "servicemonitor.yaml").read_text())
PAGE = (ROOT / "docs" / "telemetry.md").read_text()
SECRET = "Zanzibar"  # what is said to the server, and nobody else's business

Series = dict[str, list[dict[str, str]]]  # sample name -> the labels of each


@dataclass
class Observed:
    """What a server has shown while it lived."""

    page: str
    log: list[str]
    collector: Collector
    series: Series


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A server of the demo model that has answered a session's two turns and has ended."""
    data = tmp_path_factory.mktemp("data")
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        flags = ("--log-format", "json", "--metrics-compat", "vllm", "--api-key", "ann=key-of-ann")
        with ServerProcess(None, data, *flags) as server:
            ours = {"authorization": "Bearer key-of-ann", "x-request-id": "r-1"}
            for words in (f"I live in {SECRET}.", "Where do I live?"):
                body = {"messages": [{"role": "user", "content": words}]}
                assert server.post("/v1/sessions/my-chat/chat/completions", body, **ours).status_code == 200
            assert server.post("/v1/sessions/my-chat/chat/completions", {"foo": SECRET}, **ours).status_code == 400
            page = httpx.get(f"{server.url}/metrics", headers=ours).text
        lines = server.log_path.read_text().splitlines()
        series: Series = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                series.setdefault(sample.name, []).append(sample.labels)
        yield Observed(page, lines, collector, series)


# --- what is asked of the metrics -------------------------------------------------------------------------------------

STRING = re.compile(r'"(?:\\.|[^"\\])*"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"(?<![\w:$.])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(?!\s*\(|[\w:])")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*("(?:\\.|[^"\\])*")')
WORDS = {"and", "or", "unless", "bool", "offset", "sum", "by", "inf", "nan", "m", "h"}
OF_SCRAPES = {"job", "instance"}  # labels that Prometheus adds


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Each series that an expression of PromQL asks for: its name, and the matchers of its labels."""
    strings: list[str] = []

    def hidden(match: re.Match[str]) -> str:
        strings.append(match[0])
        return f'"{len(strings) - 1}"'

    bare = GROUPING.sub(" ", STRING.sub(hidden, expression))
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    found = []
    for match in SELECTOR.finditer(bare):
        if match[1] not in WORDS:
            matchers = [
                (m[1], m[2], strings[int(m[3].strip('"'))].strip('"')) for m in MATCHER.finditer(match[2] or "")
            ]
            found.append((match[1], matchers))
    return found


def faults(expression: str, series: Series) -> list[str]:
    """What an expression asks for that these series do not have."""
    found = []
    labels: set[str] = set(OF_SCRAPES)
    for name, matchers in selectors(expression):
        if name not in series:
            found.append(f"{name} does not exist")
            continue
        labels |= {label for each in series[name] for label in each}
        for label, how, value in matchers:
            if label in OF_SCRAPES:
                continue
            known = [each[label] for each in series[name] if label in each]
            if not known:
                found.append(f"{name} has no label {label}")
            elif how == "=" and value not in known and label in ("tier", "reason", "finish_reason"):
                found.append(f"{name} has no {label} {value}")
    for group in GROUPING.findall(expression):
        found += [f"nothing has the label {label}" for label in re.findall(r"\w+", group) if label not in labels]
    return found


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(a_total[5m])", None),
        (
            'sum by (tier, job) (rate(a_total{tier="disk", job=~"$job"}[$__rate_interval])) / on (job) (x_total > 0)',
            None,
        ),
        ('histogram_quantile(0.9, sum by (le) (rate(b_bucket{le!="no_such(thing)"}[5m]))) * 1e3', None),
        ("x_total or vector(0) and x_total offset 5m", None),
        ("rate(c_total[5m])", "c_total does not exist"),
        ("x_total/y_total", "y_total does not exist"),
        ("-y_total", "y_total does not exist"),
        ('a_total{kind="x"}', "a_total has no label kind"),
        ('a_total{tier="tape"}', "a_total has no tier tape"),
        ("sum by (kind) (a_total)", "nothing has the label kind"),
    ],
)
def test_what_does_not_exist_is_found(expression: str, fault: str | None) -> None:
    series: Series = {"a_total": [{"tier": "disk"}], "x_total": [{}], "b_bucket": [{"le": "1.0"}]}
    assert faults(expression, series) == ([] if fault is None else [fault])


def panels() -> Iterator[dict[str, Any]]:
    """Every panel that shows something."""
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def dashboard_expressions() -> list[str]:
    """Everything that the dashboard asks Prometheus for."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [each["expr"] for each in DASHBOARD["annotations"]["list"]]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match is not None
            found.append(f"count by ({match[2]}) ({match[1]})")
    return found


def plain(expression: str) -> str:
    """Without the dashboard's variables."""
    return expression.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*")


# --- the dashboard ----------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_the_dashboard_asks_for_what_there_is(observed: Observed) -> None:
    assert len(dashboard_expressions()) > 60
    assert [fault for expression in dashboard_expressions() for fault in faults(expression, observed.series)] == []


def test_every_panel_follows_the_variables_and_says_what_it_shows() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "job", "instance"}
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"]
        assert panel["description"].endswith(".")
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            for name, matchers in selectors(target["expr"]):
                asked = {label: value for label, _, value in matchers}
                assert (asked.get("job"), asked.get("instance")) == ("$job", "$instance"), name
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = {label for group in GROUPING.findall(target["expr"]) for label in re.findall(r"\w+", group)}
            assert shown <= (grouped or {"instance", "tier"}), panel["title"]


def test_the_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_metric_of_ours_is_shown_somewhere_or_is_known_not_to_be(observed: Observed) -> None:
    asked = {name for expression in dashboard_expressions() for name, _ in selectors(expression)}
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    families = {family.name for family in text_string_to_metric_families(observed.page)}
    ours = {name for name in families if name.startswith("warmturn_") and "_engine_process_" not in name}
    assert ours - shown == {
        "warmturn_model_info",
        "warmturn_device_evictions",
        "warmturn_line_requests",
        "warmturn_retention_hold_seconds",
        "warmturn_pictures_encoded",
        "warmturn_windows_heard",
        "warmturn_encoder_seconds",
        "warmturn_pooled_inputs",
        "warmturn_think_time_seconds",
        "warmturn_log_salvaged_sessions",
        "warmturn_session_saves",
        "warmturn_remote_bytes_capacity",
    }


# --- rules ------------------------------------------------------------------------------------------------------------


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_the_rules_ask_for_what_there_is(observed: Observed) -> None:
    recorded: Series = {rule["record"]: [{}] for rule in rules() if "record" in rule}
    series: Series = {**observed.series, **recorded, "up": [{}]}
    assert [fault for rule in rules() for fault in faults(rule["expr"], series)] == []


def test_every_alert_says_what_it_means() -> None:
    for rule in (rule for rule in rules() if "alert" in rule):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def check_with_promtool(*arguments: str, **options: Any) -> None:
    """The program that checks what Prometheus is given finds no fault."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, of the package prometheus, is not installed")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"),
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "rules_test.yaml"),
    ],
)
def test_promtool_finds_no_fault(arguments: tuple[str, ...]) -> None:
    check_with_promtool(*arguments, cwd=RULES.parent)


def test_promtool_can_read_all_that_the_dashboard_asks_for(tmp_path: Path) -> None:
    asked = [{"record": f"asked:{number}", "expr": plain(text)} for number, text in enumerate(dashboard_expressions())]
    asked = [{"record": "asked:x" + each["record"][6:], "expr": each["expr"]} for each in asked]
    file = tmp_path / "asked.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": asked}]}))
    check_with_promtool("check", "rules", str(file))


def test_promtool_finds_the_page_well_made(observed: Observed) -> None:
    ours = "".join(line for line in observed.page.splitlines(keepends=True) if "vllm:" not in line)
    check_with_promtool("check", "metrics", input=ours)


def test_the_service_monitor_finds_the_pods_and_their_job() -> None:
    services = [*yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "base" / "services.yaml").read_text())]
    wanted = SERVICE_MONITOR["spec"]["selector"]["matchLabels"]
    chosen = [each for each in services if wanted.items() <= each["metadata"]["labels"].items()]
    assert [each["spec"].get("clusterIP") for each in chosen] == ["None"]  # an address for each pod
    (endpoint,) = SERVICE_MONITOR["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in chosen[0]["spec"]["ports"]]
    assert endpoint["path"] == "/metrics"
    job = chosen[0]["metadata"]["labels"][SERVICE_MONITOR["spec"]["jobLabel"]]
    assert f'job="{job}"' in RULES.read_text()
    assert (SERVICE_MONITOR["apiVersion"], SERVICE_MONITOR["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")


# --- the page about it ------------------------------------------------------------------------------------------------


def described(heading: str) -> dict[str, list[str]]:
    """The rows of the first table under a heading, by what stands first in code in each."""
    text = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_page_tells_of_every_metric_what_it_is(observed: Observed) -> None:
    families = {family.name: family for family in text_string_to_metric_families(observed.page)}
    ours = {}
    for name, family in families.items():
        if name.startswith("warmturn_") and "_engine_process_" not in name:
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            whole = name + ("_total" if family.type == "counter" else "")
            ours[whole] = [family.type, ", ".join(f"`{label}`" for label in sorted(labels)), family.documentation]
    told = {name: row[:3] for name, row in described("Metrics").items()}
    assert told == ours


def test_the_page_tells_of_vllms_names(observed: Observed) -> None:
    theirs = {line.split()[2] for line in observed.page.splitlines() if line.startswith("# TYPE vllm:")}
    assert set(described("vLLM's names")) == theirs


# --- the log and the spans --------------------------------------------------------------------------------------------


def test_both_processes_log_json_and_nothing_of_what_was_said(observed: Observed) -> None:
    records = [json.loads(line) for line in observed.log]
    assert {record["logger"] for record in records} >= {"warmturn.server", "warmturn.engine", "warmturn.access"}
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
    requests = [record for record in records if record["logger"] == "warmturn.access" and record.get("session")]
    assert [(record["status"], record["session"], record["request_id"], record["tenant"]) for record in requests] == [
        (200, "my-chat", "r-1", "ann"),
        (200, "my-chat", "r-1", "ann"),
        (400, "my-chat", "r-1", "ann"),
    ]
    assert requests[1]["cached_tokens"] > requests[0]["cached_tokens"]
    assert all(len(record["trace_id"]) == 32 for record in requests)
    assert any(record["message"].startswith("serving ") for record in records)
    for line in observed.log:
        assert SECRET not in line
        assert "key-of-ann" not in line


def test_a_collector_gets_the_spans_of_a_server(observed: Observed) -> None:
    spans = [span for _, span in observed.collector.spans()]
    generations = [span for span in spans if span.name == "chat m"]
    requests = {span.span_id: span for span in spans if span.name.startswith("POST ")}
    assert len(generations) == 2
    assert len(requests) == 3
    for span in generations:
        assert span.parent_span_id in requests
        told = {item.key: item.value for item in span.attributes}
        assert told["gen_ai.conversation.id"].string_value == "my-chat"
        assert told["gen_ai.usage.output_tokens"].int_value > 0
    assert SECRET not in str(spans)

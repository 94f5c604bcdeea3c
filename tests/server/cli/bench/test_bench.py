"""`warmturn bench`: the load, what servers refuse of it, the figures, and a real server measured."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import environment
from server_process import ServerProcess

from server.cli.bench import bench_report
from server.cli.bench.bench import bench, pid_of
from server.cli.bench.bench_load import PROBES, BenchLoad, Client, NoAnswer, TimedTurn
from server.config.bench_options import BenchConfig
from server.config.usage_error import UsageError
from server.engine.process_tree import cpu_seconds, listener

Body = dict[str, Any]
PATIENCE = 300.0


class Peer:
    """A server of OpenAI's API that refuses some fields. ``bodies``: what it was asked."""

    def __init__(
        self, refused: tuple[str, ...] = (), *, usage: bool = True, status: int = 200, broken: str = ""
    ) -> None:
        self.refused, self.usage, self.status, self.broken = refused, usage, status, broken
        self.bodies: list[Body] = []
        self.asked = 0
        self.headers: list[httpx.Headers] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        body: Body = json.loads(request.content)
        self.asked += 1
        if self.status != 200 or (wrong := [name for name in self.refused if name in body]):
            status = self.status if self.status != 200 else 400
            return httpx.Response(status, json={"error": {"message": f"no {wrong if status == 400 else 'way'}"}})
        self.bodies.append(body)
        self.headers.append(request.headers)
        tokens: int = body.get("max_tokens") or body["max_completion_tokens"]
        events: list[Body] = [{"choices": [{"delta": {"content": f"w{i} "}}]} for i in range(tokens)]
        words = sum(len(message["content"].split()) for message in body["messages"])
        if self.usage and body.get("stream_options"):
            details = {"cached_tokens": words // 2}
            usage = {"prompt_tokens": words, "completion_tokens": tokens, "prompt_tokens_details": details}
            events.append({"choices": [], "usage": usage})
        if self.broken:
            events.insert(1, {"error": {"message": self.broken}})
        lines = [*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"]
        return httpx.Response(200, text="".join(lines))

    def run(self, work: Callable[[Client], Any], header: str | None = None) -> Any:
        async def within() -> Any:
            transport = httpx.MockTransport(self.answer)
            async with httpx.AsyncClient(base_url="http://peer/v1/", transport=transport) as http:
                return await work(Client(http, "m", None, header))

        return asyncio.run(within())


def test_chats_send_their_whole_history() -> None:
    peer = Peer()
    load: BenchLoad = peer.run(lambda client: client.chats(1, 3))
    lengths = [len(body["messages"]) for body in peer.bodies]
    assert lengths == [1, 3, 5]
    assert peer.bodies[1]["messages"][1] == {"role": "assistant", "content": load.chats[0][0].text}
    assert [turn.error for turn in load.chats[0]] == [None] * 3
    assert all(32 <= turn.output <= 96 for turn in load.chats[0])
    assert all(len(turn.gaps) == turn.output - 1 for turn in load.chats[0])


def test_the_load_is_the_same_every_time_and_differs_between_chats() -> None:
    one, two = Peer(), Peer()
    for peer in (one, two):
        peer.run(lambda client: client.chats(4, 2))
    assert sorted(map(str, one.bodies)) == sorted(map(str, two.bodies))
    assert len({body["messages"][0]["content"] for body in one.bodies}) == 4


@pytest.mark.parametrize(
    ("refused", "left_out", "length"),
    [
        ((), [], "max_tokens"),
        (("ignore_eos",), ["ignore_eos"], "max_tokens"),
        (("ignore_eos", "max_tokens"), ["ignore_eos"], "max_completion_tokens"),
        (("ignore_eos", "stream_options"), ["ignore_eos", "stream_options"], "max_tokens"),
        (("temperature",), ["temperature"], "max_tokens"),
    ],
)
def test_what_a_server_refuses_is_left_out(refused: tuple[str, ...], left_out: list[str], length: str) -> None:
    peer = Peer(refused)

    async def work(client: Client) -> list[str]:
        await client.warm_up()
        await client.chats(1, 1)
        return client.left_out

    assert peer.run(work) == left_out
    assert length in peer.bodies[-1]
    assert not set(refused) & set(peer.bodies[-1])


@pytest.mark.parametrize("peer", [Peer(("messages",)), Peer(status=401), Peer(status=500)])
def test_a_server_that_refuses_everything(peer: Peer) -> None:
    with pytest.raises(NoAnswer, match="HTTP"):
        peer.run(lambda client: client.warm_up())
    assert peer.bodies == []
    assert (peer.asked == 1) == (peer.status != 200)  # another form helps against a 400 only


def test_without_usage_pieces_are_counted() -> None:
    turn: TimedTurn = Peer(usage=False).run(lambda client: client.turn([{"role": "user", "content": "a"}], 7, "c"))
    assert (turn.output, turn.prompt, turn.error) == (7, 0, None)


def test_reasoning_is_timed_and_is_no_history() -> None:
    deltas: list[Body] = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"reasoning": "so"}, {"content": "yes"}]
    lines = [f"data:{json.dumps({'choices': [{'delta': delta}], 'usage': None})}\n\n" for delta in deltas]

    async def work() -> TimedTurn:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=": ping\n\n" + "".join(lines)))
        async with httpx.AsyncClient(base_url="http://peer/v1/", transport=transport) as http:
            return await Client(http, "m", None).turn([], 3, "c")

    turn = asyncio.run(work())
    assert (turn.text, turn.output, len(turn.gaps), turn.error) == ("yes", 3, 2, None)


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_that_the_server_has_closed_is_no_failed_turn(times: int) -> None:
    peer, left = Peer(), [httpx.RemoteProtocolError("Server disconnected without sending a response.")] * times

    def answer(request: httpx.Request) -> httpx.Response:
        if left:
            raise left.pop()
        return Peer.answer(peer, request)

    peer.answer = answer  # type: ignore[method-assign]
    turn: TimedTurn = peer.run(lambda client: client.turn([{"role": "user", "content": "a"}], 7, "c"))
    assert (turn.error is None, turn.output) == ((True, 7) if times == 1 else (False, 0))


def test_an_answer_that_breaks_off_is_a_failed_turn() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
        raise httpx.RemoteProtocolError("incomplete chunked read")

    peer, answers = Peer(), [httpx.Response(200, content=broken())]
    peer.answer = lambda request: answers.pop() if answers else Peer.answer(peer, request)  # type: ignore[method-assign]
    turn: TimedTurn = peer.run(lambda client: client.turn([{"role": "user", "content": "a"}], 7, "c"))
    assert "incomplete" in str(turn.error)


def test_an_error_in_a_stream_ends_its_chat() -> None:
    load: BenchLoad = Peer(broken="out of words").run(lambda client: client.chats(1, 3))
    assert len(load.chats[0]) == 1
    assert "out of words" in str(load.chats[0][0].error)
    figures = bench_report.figures(load)
    assert (figures["failed"], figures["turns"], figures["output_tokens"]) == (1, 0, 0)
    assert "| 1 |" in bench_report.row(load)


def test_history_grows_to_its_length() -> None:
    peer = Peer()
    load: BenchLoad = peer.run(lambda client: client.history(400))
    assert len(load.chats[0]) == PROBES
    assert all(turn.prompt >= 400 - 32 for turn in load.chats[0])
    assert [body["max_tokens"] for body in peer.bodies[-PROBES:]] == [1] * PROBES


def test_a_router_can_tell_chats_apart() -> None:
    peer = Peer()
    peer.run(lambda client: client.chats(2, 2), "X-Session-ID")
    assert len({headers["x-session-id"] for headers in peer.headers}) == 2


# --- the report ----------------------------------------------------------------------------------------------


def test_figures() -> None:
    first = TimedTurn(first=0.1, total=1.0, prompt=10, cached=0, output=5, gaps=[0.01, 0.03])
    later = TimedTurn(first=0.3, total=1.0, prompt=30, cached=20, output=15, gaps=[0.02])
    of = bench_report.figures(BenchLoad("l", 4.0, 2.0, [[first, later], [TimedTurn(error="HTTP 500")]]))
    assert (of["output_tokens"], of["output_tokens_per_cpu_second"], of["output_tokens_per_second"]) == (20, 10.0, 5.0)
    assert (of["first_turn_ttft_p50"], of["later_turns_ttft_p50"], of["inter_token_p50"]) == (0.1, 0.3, 0.02)
    assert (of["cached_share"], of["failed"], of["errors"]) == (0.5, 1, ["HTTP 500"])
    told = bench_report.row(BenchLoad("l", 4.0, None, [[first, later]]))
    assert told == "| l | 20 | - | 5.0 | 100 | 300 | 50 % | 20 / 29 | 0 |"
    assert told.count("|") == bench_report.HEAD.splitlines()[0].count("|")


def test_what_is_read_of_weights_by_products_and_by_whole_steps() -> None:
    told = {"weight_bytes": 10**8, "memory": 4e10, "speeds": [[2e10, 3.6e10], [1e10]], "chosen": [1, 0]}
    told |= {"threads": 1, "huge_pages": 1.0, "rows": [1, 4], "ways": [["in order", "prefetching"], ["in order"]]}
    alone = BenchLoad("1 sessions, 4 turns", 1.0, 1.0, [[TimedTurn(gaps=[0.005, 0.005])]])
    read = bench_report.weight_reading({"weight_reading": told}, [alone])
    assert bench_report.reading_line(read) == (
        "one chat: products read 36.0 GB/s of weights, 90 % of the 40.0 GB/s that memory gives; "
        "whole steps 20.0 GB/s, 50 %"
    )
    assert bench_report.weight_reading({}, [alone]) == {}
    assert bench_report.weight_reading({"weight_reading": told}, [BenchLoad("4 sessions", 1.0, 1.0, alone.chats)]) == {}


def test_a_part_of_few_values() -> None:
    assert bench_report.quantile([], 0.5) is None
    assert bench_report.quantile([3.0], 0.95) == 3.0
    assert bench_report.quantile([1.0, 2.0, 4.0], 0.5) == 2.0


def test_a_report_names_machine_versions_date_and_what_was_left_out() -> None:
    told = bench_report.about("demo", ["ignore_eos"])
    for part in ("warmturn 0.1.0", "torch", "processors", "without ignore_eos", time.strftime("%Y-", time.gmtime())):
        assert part in told


# --- processes and a real server -----------------------------------------------------------------------------


def test_cpu_seconds_are_those_of_the_whole_tree() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    before = cpu_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert before is not None
        assert (cpu_seconds(os.getpid()) or 0) - before >= 0.3
        assert (cpu_seconds(child.pid) or 0) >= 0.3
        child.communicate(b"\n")
    assert cpu_seconds(None) is None


def test_who_listens_on_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here:
        number = here.getsockname()[1]
        assert listener(number) == os.getpid()
        assert pid_of(BenchConfig(target=f"http://127.0.0.1:{number}/v1")) == os.getpid()
        assert pid_of(BenchConfig(target=f"http://127.0.0.1:{number}/v1", pid=1)) == 1
        client = socket.create_connection(("127.0.0.1", number))
        connection, _ = here.accept()
    with client, connection:  # whoever is connected does not listen
        assert listener(number) is None
    assert pid_of(BenchConfig(target=f"http://10.0.0.1:{number}")) is None


def test_no_server_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for config in (BenchConfig(target=url), BenchConfig(url=url)):
        assert bench(config, io.StringIO()) == 1
        told = capsys.readouterr().err
        assert told == f"warmturn: no server of OpenAI's API answers at {url} (ConnectError)\n"


def test_a_server_that_does_not_start() -> None:
    with pytest.raises(UsageError, match=r"^the server did not start: --port: expected a whole number"):
        bench(BenchConfig(serve_flags=["--port", "many"]), io.StringIO())


@pytest.mark.wide
def test_a_real_server_by_its_url(tmp_path: Path) -> None:
    with ServerProcess(None, tmp_path, "--api-key", "ann=k1") as server:
        config = BenchConfig(
            target=server.url, api_key="k1", sessions=[2], turns=2, history=[100], out=tmp_path / "r" / "report.md"
        )
        out = io.StringIO()
        assert bench(config, out) == 0
        with pytest.raises(UsageError, match=r"^--api-key: the server refused this key, or needs one$"):
            bench(BenchConfig(target=server.url, sessions=[1]), io.StringIO())
    *_, chats, history, _, about = out.getvalue().splitlines()
    assert chats.startswith("| 2 sessions, 2 turns | ")
    assert history.startswith("| 16 words on ")
    assert float(chats.split(" | ")[2]) > 0  # per CPU second of a process that was found by itself
    assert int(chats.split(" | ")[6].removesuffix(" %")) > 10
    assert (config.out or Path()).read_text() == f"{about}\n\n{bench_report.HEAD}\n{chats}\n{history}\n"
    assert "without" not in about


@pytest.mark.slow
def test_a_model_is_served_and_measured() -> None:
    command = [sys.executable, "-P", "-m", "server", "bench", "demo", "--json", "--sessions", "1", "--turns", "2"]
    command += ["--", "--device", "cpu", "--kv-memory", "8MiB"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    (load,) = json.loads(ran.stdout)["loads"]
    assert (load["turns"], load["failed"]) == (2, 0)
    assert load["output_tokens"] >= 64
    assert load["output_tokens_per_cpu_second"] > 0
    assert load["cached_share"] > 0.1

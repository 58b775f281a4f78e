"""The gate of a run: what it holds, wakes, passes and turns away. Cases of other tools are named by their public reports."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.serving import Serving, Stage, make_stage, stage
from tests.simulated_machine import eventually

__all__ = ["stage"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One run for the tests that leave it as it was: serving, whenever it is asked to."""
    made = make_stage(tmp_path_factory.mktemp("shared"))
    yield next(made).run("--max-waiting", "10").awake()
    next(made, None)


@pytest.fixture
def asleep(shared: Serving) -> Serving:
    return shared.suspended()


@pytest.mark.parametrize(
    "path",
    [
        "/sleep?level=1",
        "//sleep",
        "/%73leep",
        "/%2573leep",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/..%2fsleep",
        "/./sleep",
        "/sleep/",
        "/v1\\..\\sleep",
        "/v1;/../sleep",
        "http://localhost/sleep",
        "HTTP://user@localhost:1/%73leep",
        "/wake_up",
        "/collective_rpc",
        "/is_sleeping",
        "/pause",
        "/server_info",
        "/reset_prefix_cache",
        "sleep",
    ],
)
def test_dev_endpoints_are_not_there(shared: Serving, path: str) -> None:
    slept = len(shared.notes("sleep"))
    for method in ("POST", "GET"):
        with shared.dial(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n") as s:
            status = s.makefile("rb").readline().split()[1]
        assert status in (b"404", b"400")
    assert len(shared.notes("sleep")) == slept


def test_header_smuggling(shared: Serving) -> None:
    slept = len(shared.notes("sleep"))
    served = len(shared.notes("begin"))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    both = f"{head}0\r\n\r\nPOST /sleep HTTP/1.1\r\n\r\n"
    with shared.dial(both) as s:
        assert b" 400 " in s.makefile("rb").readline()
    assert len(shared.notes("sleep")) == slept
    hidden = {"Connection": "X-Secret, close", "X-Secret": "1", "X-Kept": "1", "Proxy-Authorization": "x"}
    assert shared.complete(hidden).status == 200
    (headers,) = [n["headers"] for n in shared.notes("begin")[served:] if n["path"] == "/v1/completions"]
    assert "X-Kept" in headers
    assert not {"X-Secret", "Proxy-Authorization"} & set(headers)


@pytest.mark.parametrize("named", ["Content-Length", "content-length, close", "Host", "Content-Type"])
def test_a_body_is_never_taken_for_a_request(shared: Serving, named: str) -> None:
    """Whatever a client says belongs to its connection: the body goes on with its own length."""
    slept = len(shared.notes("sleep"))
    begun = len(shared.notes("begin"))
    body = "POST /sleep HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: {named}\r\n\r\n"
    with shared.dial(head + body) as s:
        assert s.makefile("rb").readline().startswith(b"HTTP/1.1 ")
    shared.get("/version")
    assert [n["path"] for n in shared.notes("begin")[begun:] if n["path"] != "/health"] == ["/v1/completions", "/version"]
    assert len(shared.notes("sleep")) == slept


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5, 6\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 5\r\nTransfer-Encoding : chunked\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\n\tTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nX: a\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nX: a\rTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nX: a\0b\r\n",
        "Content-Length: 5\r\nX Y: a\r\n",
        "Content-Length: 5\r\n: a\r\n",
    ],
)
def test_a_head_with_two_readings_reaches_nobody(shared: Serving, head: str) -> None:
    """What another parser may take for a second request, or for a body of another length."""
    begun = len(shared.notes("begin"))
    with shared.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n0\r\n\r\nPOST /sleep HTTP/1.1\r\nHost: x\r\n\r\n") as s:
        assert b" 400 " in s.makefile("rb").readline()
    shared.get("/version")
    assert [n["path"] for n in shared.notes("begin")[begun:] if n["path"] != "/health"] == ["/version"]


def test_bytes_pass_as_they_come(shared: Serving) -> None:
    body = json.dumps({"stream": True, "seconds": 1.0, "chunks": 4})
    with shared.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}") as s:
        begun, first, received = time.monotonic(), 0.0, b""
        while b"[DONE]" not in received:
            received += s.recv(65536)
            if not first and b'{"n": 0}' in received:
                first = time.monotonic() - begun
    assert 0 < first < 0.7
    assert b"text/event-stream" in received


def test_a_refusal_of_the_server_passes_unchanged(shared: Serving) -> None:
    """Case 11: mostlygeek/llama-swap#887"""
    answer = shared.complete(status=429)
    assert (answer.status, answer.error, answer.headers["x-limit"]) == (429, {"message": "over the limit", "code": "limit"}, "1")


def test_a_large_body_passes_in_pieces(shared: Serving) -> None:
    size, piece = 1 << 30, b"x" * (1 << 22)
    with shared.dial(f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\nExpect: 100-continue\r\n\r\n") as s:
        file = s.makefile("rb")
        assert file.readline() == b"HTTP/1.1 100 Continue\r\n"
        file.readline()
        for _ in range(size // len(piece)):
            s.sendall(piece)
        assert b" 200 " in file.readline()
    assert int(Path(f"/proc/{shared.process.pid}/statm").read_text().split()[1]) * 4096 < 200 << 20, "it was not kept"


@pytest.mark.parametrize("nbytes", [100, 200_000])
def test_a_request_is_sent_once(shared: Serving, nbytes: int) -> None:
    """Whether the server has begun with it nobody knows, once it is gone."""
    begun = len(shared.notes("begin"))
    answer = shared.complete(drops=True, prompt="x" * nbytes)
    assert (answer.status, answer.error["code"]) == (502, "server-unreachable")
    assert answer.headers["x-should-retry"] == "false"
    assert [n["path"] for n in shared.notes("begin")[begun:] if n["path"] != "/health"] == ["/v1/completions"]
    assert shared.complete(id=1).status == 200


def test_the_work_ends_when_the_client_leaves(shared: Serving) -> None:
    """Case 23: vllm-project/production-stack#867"""
    cut = len(shared.notes("cut"))
    body = '{"seconds": 20}'
    s = shared.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}")
    eventually(lambda: shared.facts["requests_running"] == 1, "it runs")
    s.close()
    eventually(lambda: len(shared.notes("cut")) > cut, "it was cut", 2.0)
    eventually(lambda: shared.facts["requests_running"] == 0, "the count is back", 2.0)


def test_sleep_names_its_mode_and_finds_no_request_running(shared: Serving) -> None:
    """The server's default aborts what runs."""
    assert shared.complete().status == 200
    cut, slept = len(shared.notes("cut")), len(shared.notes("sleep"))
    client = shared.begin(seconds=0.7, stream=True)
    eventually(lambda: shared.facts["requests_running"], "it runs")
    shared.suspended()
    assert client.result().body.endswith(b"[DONE]\n\n")
    (note,) = shared.notes("sleep")[slept:]
    assert note["query"] == {"level": "1", "mode": "wait"}
    assert note["running"] == 0
    assert len(shared.notes("cut")) == cut


def test_longer_than_the_drain_is_not_suspended(shared: Serving) -> None:
    assert shared.complete().status == 200
    slept = len(shared.notes("sleep"))
    client = shared.begin(seconds=1.0)
    eventually(lambda: shared.facts["requests_running"], "it runs")
    assert shared.ask("suspend", drain_s=0.2)["error"]["code"] == "still-serving"
    assert shared.state == "awake"
    assert client.result().status == 200
    assert len(shared.notes("sleep")) == slept


def test_what_the_server_does_for_nobody_is_drained_too(shared: Serving) -> None:
    """Else its own sleep waits for that, without an end; given up, it would come all the same, under requests let in since."""
    assert shared.complete(background=5.0).status == 200
    slept = len(shared.notes("sleep"))
    error = shared.ask("suspend", drain_s=0.1)["error"]
    assert (error["code"], error["message"][:37]) == ("still-serving", "the server was still at work after 3 ")
    assert shared.state == "awake"
    assert shared.complete(id=1).status == 200, "it was told to go on"
    assert len(shared.notes("sleep")) == slept
    assert shared.ask("suspend", drain_s=20)["ok"], "once it is done"
    assert shared.complete(id=2).status == 200
    assert not shared.notes("computed asleep")


def test_looking_wakes_nothing_and_takes_no_place(asleep: Serving) -> None:
    """Case 5: goniz/opencode-local-provider#14, ctrox/zeropod#34"""
    run, woken = asleep, asleep.stderr.count(": resuming\n")
    paths = ("/", "/props", "/slots", "/api/tags", "/v1/models/NAME", "/tokenizer_info", "/favicon.ico", "/ping", "/v1/chat/completions")
    for path in paths:
        for method in ("HEAD", "OPTIONS", "GET"):
            assert run.request(method, path).status < 500
    run.dial(b"").close()
    run.request("POST", "/wp-login.php", {})
    assert [run.request("POST", p, {}).status for p in ("/ping", "/ping/", "/health")] == [404, 404, 405], "it answers by itself"
    assert run.facts["requests_waiting"] == 0
    assert run.state == "suspended"
    assert run.stderr.count(": resuming\n") == woken


HANDSHAKE = (
    "{} HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: {}\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def shake(run: Serving, request: str = "GET /v1/realtime", version: int = 13, then: str = "") -> tuple[int, dict[str, Any]]:
    """The status and the error that answer a handshake."""
    with run.dial(HANDSHAKE.format(request, version) + then) as s:
        head, _, body = s.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


def test_what_asks_for_a_websocket_where_there_is_none_wakes_nothing(shared: Serving) -> None:
    run = shared
    run.set(status={"/v1/realtime": "200"})
    run.suspended()
    woken = run.stderr.count(": resuming\n")
    after = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    for request in ("GET /v1/models", "GET /v1/chat/completions", "POST /v1/completions", "GET /", "GET /v1/realtime/"):
        status, error = shake(run, request, then=after)
        assert (status, error["code"]) == (404, "upgrade-refused")
    for request, version in (("GET /v1/realtime", 99), ("POST /v1/realtime", 13)):
        assert shake(run, request, version)[0] == 400
    assert run.get("/v1/models", Upgrade="websocket").json["data"], "it does not ask for one"
    assert run.facts["requests_waiting"] == 0
    assert run.state == "suspended"
    assert run.stderr.count(": resuming\n") == woken

    status, error = shake(run)
    assert (status, error["code"], error["type"]) == (502, "upgrade-refused", "service_unavailable_error")
    assert run.state == "awake"
    run.set(status={"/v1/realtime": ""})


def test_websockets_pass(asleep: Serving) -> None:
    run = asleep

    async def talk() -> tuple[str, bytes, int | None, str | None]:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{run.port}/v1/realtime"
            async with session.ws_connect(url, protocols=("realtime",)) as ws:
                await ws.send_str("hello")
                text = await ws.receive_str()
                await ws.send_bytes(b"\0" * 100_000)
                data = await ws.receive_bytes()
                await ws.send_str("bye")
                await ws.receive()
                return text, data, ws.close_code, ws.protocol

    assert asyncio.run(talk()) == ("echo hello", b"\0" * 100_000, 4001, "realtime")
    eventually(lambda: run.facts["requests_running"] == 0, "it is over")


def test_held_requests_go_in_order_and_a_full_waiting_room_refuses_before_the_body(shared: Serving) -> None:
    """After the wake, and after the server said that it is healthy."""
    run = shared
    run.set(slow_wake=1.0)
    begun = len(run.suspended().notes("begin"))
    clients = []
    for n in range(10):
        clients.append(run.begin({"X-N": str(n)}, id=n))
        eventually(lambda n=n: run.facts["requests_waiting"] == n + 1, "it waits")
    with run.dial("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n") as s:
        head = s.recv(65536).decode()
    assert head.startswith("HTTP/1.1 429 ")
    assert "x-should-retry: true" in head.lower()
    assert [c.result().json["id"] for c in clients] == list(range(10))
    asked = [(n["path"], n["headers"].get("X-N")) for n in run.notes("begin")[begun:]]
    assert asked == [("/wake_up", None), ("/health", None), *(("/v1/completions", str(n)) for n in range(10))]
    run.set(slow_wake=0.0)


def test_a_client_that_leaves_while_held_is_not_served(shared: Serving) -> None:
    """Case 9: mostlygeek/llama-swap#727"""
    run = shared
    run.set(slow_wake=1.0)
    begun = len(run.suspended().notes("begin"))
    body = '{"id": "gone"}'
    s = run.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}")
    eventually(lambda: run.facts["requests_waiting"] == 1, "it waits")
    s.close()
    eventually(lambda: run.facts["requests_waiting"] == 0, "it left")
    assert run.complete(id="here").json["id"] == "here"
    assert len([n for n in run.notes("begin")[begun:] if n["path"] == "/v1/completions"]) == 1
    run.set(slow_wake=0.0)


def test_health_is_about_serving_and_awake_about_the_gpu(stage: Stage) -> None:
    run = stage.run(fake=("--slow-load", "1"))
    eventually(lambda: run.port, "the gate listens")
    assert [run.get(p).status for p in ("/health", "/ready", "/awake")] == [503, 503, 503]
    held = run.begin(id=1)  # held while it starts
    assert held.result().status == 200
    assert [run.get(p).status for p in ("/health", "/ready", "/awake")] == [200, 200, 200]
    run.suspended()
    assert [run.get(p).status for p in ("/health", "/ready", "/awake")] == [200, 200, 503]


def test_keys_and_a_hold_that_is_too_short(stage: Stage) -> None:
    """Case 14: mostlygeek/llama-swap#50, #1051. Case 13: mostlygeek/llama-swap#225, kedacore/http-add-on#1592"""
    key = {"Authorization": "Bearer other"}
    options = ("--hold", "300ms", "--max-waiting", "1")
    run = stage.run(*options, fake=("--slow-wake", "1.5", "--api-key", "secret", "other")).awake().suspended()
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer"}):
        assert run.complete(headers).status == 401
        assert run.request("POST", "/invocations", {}, headers).status == 401
        assert run.request("GET", "/v1/models", headers=headers).status == 401
    for odd in ("Bearer  other", "Bearer s\xe9cret"):  # the server takes neither
        answer = run.complete({"Authorization": odd})
        assert (answer.status, answer.error["code"]) == (401, "unauthorized")
    assert run.facts["requests_waiting"] == 0
    assert run.state == "suspended"
    answer = run.complete(key, id=1)
    assert answer.status == 503
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert answer.headers["x-should-retry"] == "true"
    assert set(answer.error) == {"message", "type", "param", "code"}
    run.until("awake")
    asked = [n for n in run.notes("begin") if n["path"] in ("/v1/completions", "/invocations")]
    assert not asked, "none of them was executed"
    assert run.complete(key, id=2).status == 200
    seconds = int(run.suspended().complete(key, id=3).headers["retry-after"])
    assert 2 <= seconds < 10, "what the last one took"


def test_five_hundred_held_and_a_short_backlog(stage: Stage) -> None:
    """Case 22: knative/serving#9888"""
    run = stage.run(fake=("--slow-wake", "3", "--at-once", "32", "--backlog", "16")).awake().suspended()
    body = '{"id": 1}'
    text = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    sockets: list[socket.socket] = [run.dial(text) for _ in range(500)]
    answers = []
    for s in sockets:
        with s:
            answers.append(s.makefile("rb").read().split()[1])
    assert answers == [b"200"] * 500

"""What a run does only if asked: comments to held streams, an admin listener, a cache that is kept."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuckpt import errors
from gpuckpt.supervisor.admin import read_token
from tests.serving import Serving, Stage, stage
from tests.simulated_machine import COMMAND, eventually

__all__ = ["stage"]


def streamed(run: Serving, **body: object) -> socket.socket:
    text = json.dumps({"stream": True, "chunks": 2, **body})
    return run.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}")


def test_held_streams_get_comments(stage: Stage) -> None:
    """Cases 11 and 13: mostlygeek/llama-swap#225, #887, knative/serving#13208"""
    run = stage.run("--hold", "2s", "--hold-comments", "100ms", fake=("--slow-wake", "1")).awake().suspended()
    gaps, last = [], time.monotonic()
    plain = run.begin(id="plain")
    refused = streamed(run, status=429)
    with streamed(run, id=1) as s:
        received = b""
        while piece := s.recv(65536):
            gaps.append(time.monotonic() - last)
            last, received = time.monotonic(), received + piece
    assert received.count(b": waiting for the model\n\n") >= 3
    assert max(gaps) < 0.9, "no silence as long as the wake"
    head, _, _ = received.partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"text/event-stream" in head
    assert received.endswith(b"0\r\n\r\n"), "whole"
    assert b'data: {"n": 1}' in received
    assert plain.result().json["id"] == "plain"
    with refused:
        received = refused.makefile("rb").read()
    assert b'data: {"error": {"message": "over the limit", "code": "limit"}}' in received
    assert not received.endswith(b"0\r\n\r\n"), "a refusal after a comment is an event, and no whole answer"
    assert len([n for n in run.notes("begin") if n["path"] == "/v1/completions"]) == 3

    run.suspended()
    with socket.socket(socket.AF_UNIX) as held:  # as a lease does
        held.connect(str(stage.runtime / "m.sock"))
        held.sendall(b'{"schema": 1, "command": "hold", "gpus": null, "by": "somebody has a lease", "within_s": 5}\n')
        with streamed(run) as leaver:
            leaver.recv(10)
        with streamed(run) as s:
            received = s.makefile("rb").read()
        assert b'"code": "waking"' in received
        assert b"somebody has a lease" in received
        assert not received.endswith(b"0\r\n\r\n"), "a hold that ends after a comment says so"
    eventually(lambda: run.facts["requests_waiting"] == run.facts["requests_running"] == 0, "who left is forgotten")
    assert len([n for n in run.notes("begin") if n["path"] == "/v1/completions"]) == 3


def test_the_admin_listener(stage: Stage) -> None:
    token = stage.machine.path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    options = ("--admin", "127.0.0.1:0", "--admin-token-file", str(token), "--drain", "100ms")
    run = stage.run(*options, fake=("--sleep-frees", "6")).awake()
    port = int(next(x for x in run.stderr.splitlines() if "admin listener on" in x).rpartition(":")[2])

    def ask(method: str, path: str, key: str = "secret") -> tuple[int, object]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, headers={"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            text = answer.read()
        return answer.status, json.loads(text) if text else None

    assert ask("POST", "/sleep?level=1", key="wrong")[0] == 401
    assert ask("GET", "/is_sleeping") == (200, {"is_sleeping": False})
    assert ask("POST", "/sleep?level=1") == (200, None)
    assert run.state == "suspended"
    assert stage.machine.used() == 0
    assert ask("GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert run.facts["dropped_bytes"] == run.facts["cache"]["dropped_bytes"] == 6 << 30
    assert "6.0 GiB of its cache are dropped" in stage.gpuckpt("status", "m", json=False).stdout
    assert "6.0 GiB of its cache are dropped; --keep kv_cache keeps them" in run.stderr
    assert ask("POST", "/wake_up") == (200, None)
    assert run.complete(id=1).status == 200
    client = run.begin(seconds=1.0)
    eventually(lambda: run.facts["requests_running"], "it runs")
    status, refused = ask("POST", "/sleep")
    assert (status, refused["error"]["code"]) == (503, "still-serving"), "a request is never cut for it"  # type: ignore[index]
    assert client.result().status == 200
    assert ask("POST", "/collective_rpc")[0] == 404
    assert run.get("/is_sleeping").status == 404, "not on the gate"


def test_a_token_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for text, mode, said in (("x", 0o644, "others may read it"), ("", 0o600, "is empty")):
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(errors.Usage, match=said):
            read_token(str(path))
    with pytest.raises(errors.Usage, match="No such file"):
        read_token(str(tmp_path / "none"))


def test_a_cache_that_is_kept(stage: Stage) -> None:
    """Case 26: mostlygeek/llama-swap#1127. The driver takes all of it; what is dropped otherwise is said."""
    stage.machine.host_memory(512, 256)
    planned = stage.gpuckpt("run", "--dry-run", "--keep", "kv_cache", "--json", "--", "vllm", "serve", "m", json=False).document["keep"]
    assert (planned["most_bytes"], planned["host_bytes_available"], planned["timeout_seconds"]) == (80 << 30, 256 << 30, 220.0)
    assert "the cache included: at most 80.0 GiB, all the memory of 1 GPU; how much is said once it has started" in planned["words"]
    run = stage.run("--keep", "kv_cache", fake=("--sleep-frees", "6")).awake()
    assert "each suspend moves all 8.0 GiB to host memory by the driver, the cache included; 256.0 GiB are available" in run.stderr
    assert run.facts["cache"] is None, "it was never suspended"
    said = stage.gpuckpt("suspend", "m", json=False).stdout
    assert "the cache is kept: all 8.0 GiB were moved by the driver in " in said
    assert "8.0 GiB of host memory hold them" in said
    assert run.notes("pause")[-1]["query"] == {"level": "0", "mode": "wait"}
    assert not run.notes("sleep")
    facts = run.facts
    assert (facts["host_bytes"], facts["dropped_bytes"]) == (8 << 30, 0)
    kept = facts["cache"]
    assert (kept["kept"], kept["moved_bytes"], kept["host_bytes"], kept["dropped_bytes"]) == (True, 8 << 30, 8 << 30, 0)
    assert run.complete(id=1).status == 200


def test_a_log_that_cannot_be_written_stops_nothing(stage: Stage) -> None:
    """Case 24: reticlehq/reticle#319. The command's output goes where this program's does; no copy is kept, nothing waits for a reader."""
    script = "import os\nfor _ in range(1000):\n try: os.write(1, b'x' * 65536)\n except OSError: pass\nraise SystemExit(7)"
    with open("/dev/full", "w") as full:
        words = [COMMAND, "run", "--name", "m", "--", sys.executable, "-c", script]
        assert subprocess.run(words, env=stage.environ, stdout=full, stderr=full, check=False, timeout=60).returncode == 7
    assert sum(p.stat().st_size for p in stage.runtime.rglob("*") if p.is_file()) < 4096

"""Several hosts through the real command line: what they agree on, what one refuses for all, and who may speak."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuckpt.model import State
from tests.hosts import Cluster, waits
from tests.simulated_machine import Machine, eventually

RUNNING, LOCKED, CHECKPOINTED = State.RUNNING, State.LOCKED, State.CHECKPOINTED
Make = Callable[..., Cluster]


def test_eight_ranks_on_four_hosts_and_back(cluster: Make) -> None:
    c = cluster(4)
    c.one_job(2)
    down = c.all("suspend")
    assert [r.code for r in down] == [0] * 4, [r.error for r in down if r.code]
    assert set(c.states()) == {CHECKPOINTED}
    (record,) = c.machines[2].records()
    assert record["schema"] == 2
    assert record["membership"]["phase"] == "committed"
    assert (record["membership"]["node"], len(record["membership"]["hosts"])) == (2, 4)
    pid = c.ranks[2][0].pid
    alone = c.machines[2].gpuckpt("resume", pid)
    assert (alone.code, alone.error["code"]) == (6, "several-hosts")
    assert f"gpuckpt resume {pid} --rendezvous {c.url} --nodes 4 --node-rank 2" in alone.error["hint"]
    assert "node 2 of 4" in c.machines[2].gpuckpt("status", pid, json=False).stdout
    assert c.machines[2].gpuckpt("recover").document["recovered"] == []
    up = c.all("resume")
    assert [r.code for r in up] == [0] * 4, [r.error for r in up if r.code]
    assert c.whole()
    assert not any(m.records() for m in c.machines)


PROGRAM = """
import sys, gpuckpt
from gpuckpt import errors
pid, url, node = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
try:
    gpuckpt.suspend(pid, nodes=2)
except errors.Usage as e:
    assert "rendezvous" in e.message, e
there = {"rendezvous": url, "nodes": 2, "node_rank": node, "timeout_s": 20}
down = gpuckpt.suspend(pid, **there)
try:
    gpuckpt.resume(pid)
except errors.SeveralHosts as e:
    assert "--nodes 2" in e.hint, e
up = gpuckpt.resume(pid, **there)
print(*(p.state for r in (down, up) for p in r.processes))
"""


def test_the_library_does_what_the_commands_do(cluster: Make) -> None:
    c = cluster(2)
    c.one_job(1)
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(c.ranks[node][0].pid), c.url, str(node)],
            stdout=subprocess.PIPE,
            text=True,
            env=machine.environ,
        )
        for node, machine in enumerate(c.machines)
    ]
    assert [p.communicate(timeout=60)[0].split() for p in begun] == [["suspended", "running"]] * 2
    assert c.whole()


def test_asked_twice_it_is_done_once(cluster: Make) -> None:
    c = cluster(2)
    c.own_jobs()
    for command in ("suspend", "resume"):
        for already in (False, True):
            results = c.all(command, place=False)
            assert [(r.code, r.document["already"]) for r in results] == [(0, already)] * 2, results
    assert c.whole()


def test_a_failure_on_one_host_is_the_root_cause_on_all(cluster: Make) -> None:
    c = cluster(2)
    c.one_job(4 // 2)
    c.machines[1].world.add_fault("checkpoint", pid=c.ranks[1][1].pid, result="UNKNOWN")
    first, second = c.all("suspend")
    assert (first.code, first.error["code"]) == (1, "other-host"), first
    assert f"(node 1): checkpoint of pid {c.ranks[1][1].pid}" in first.error["message"]
    assert "rank 3 of tp" in first.error["message"]
    assert (second.code, second.error["code"]) == (1, "driver-error"), second
    assert c.whole()
    assert not any(m.records() for m in c.machines)


def test_what_ends_a_suspend_before_its_commit_takes_all_back(cluster: Make) -> None:
    """Eight ranks of one communicator, their agents disarmed: whatever ends it then, nobody is held, for nothing was checkpointed."""
    c = cluster(2, gpus=4)
    c.one_job(4)
    ours, theirs = c.ranks[0][0], c.ranks[1][2]
    for result, codes in (("UNKNOWN", [1, 1]), ("NOT_READY", [124, 124])):
        c.machines[1].world.add_fault("lock", pid=theirs.pid, result=result)
        assert ([r.code for r in c.all("suspend")], c.whole()) == (codes, True)
    c.machines[1].world.add_fault("lock", pid=theirs.pid, delay_s=1.0)
    running = [c.begin(h, "suspend") for h in range(2)]
    eventually(lambda: c.states()[0] is LOCKED, f"pid {ours.pid} is locked, and waits for the other host")
    running[0].signal(signal.SIGINT)
    results = [r.end() for r in running]
    assert [r.code for r in results] == [130, 1], results
    assert c.whole()
    assert not any(m.records() for m in c.machines)


def test_no_room_on_one_host_restores_none(cluster: Make) -> None:
    c = cluster(2)
    c.own_jobs()
    assert [r.code for r in c.all("suspend")] == [0, 0]
    filler = c.machines[1].target("--gib", "79.5")
    first, second = c.all("resume")
    assert (first.code, first.error["code"], second.code) == (6, "gpu-memory", 6)
    assert set(c.states()) == {CHECKPOINTED}
    filler.kill()
    assert [r.code for r in c.all("resume")] == [0, 0]
    assert c.whole()


def test_a_host_that_never_comes(cluster: Make) -> None:
    c = cluster(2)
    c.own_jobs()
    result = c.begin(0, "suspend", timeout="1s").end()
    assert (result.code, result.error["code"]) == (124, "host-missing")
    assert "node 1 has not come" in result.error["message"]
    assert c.whole()
    assert not c.machines[0].records()
    assert [r.code for r in c.all("suspend")] == [0, 0]  # what it left in the store disturbs nobody


def test_a_host_that_refuses_tells_the_others(cluster: Make) -> None:
    c = cluster(2)
    c.own_jobs()
    waiting = c.begin(0, "suspend")
    waits(c, 0)
    c.ranks[1][0].stop()
    refused = c.begin(1, "suspend").end()
    assert (refused.code, refused.error["code"]) == (6, "stopped")
    result = waiting.end()
    assert (result.code, result.error["code"]) == (6, "stopped"), result
    assert f"pid {c.ranks[1][0].pid} is stopped" in result.error["message"]


@pytest.mark.parametrize(
    ("size", "nccl", "said"),
    [(3, (), "rank 2 of 3 is on none of these hosts"), (2, ("2.30.7", "2.29.7"), "2.29.7 in pid")],
    ids=["a rank is nowhere", "versions of NCCL"],
)
def test_communicators_are_looked_at_over_all_hosts(cluster: Make, size: int, nccl: tuple[str, ...], said: str) -> None:
    c = cluster(2)
    c.one_job(1, size, nccl=nccl)
    for result in c.all("suspend"):
        assert (result.code, result.error["code"]) == (6, "nccl-communicator"), result
        assert said in result.error["message"]
    assert c.whole()


def test_one_part_of_a_job_is_refused_without_the_others(cluster: Make) -> None:
    """Case 43, over hosts."""
    c = cluster(2)
    c.one_job(1)
    result = c.machines[0].gpuckpt("suspend", c.ranks[0][0].pid)
    assert (result.code, result.error["code"]) == (6, "nccl-communicator")
    assert "rank 1 of 2 is not in it" in result.error["message"]
    assert "--rendezvous" in result.error["hint"]


def test_a_person_is_told_how_all_come_back(cluster: Make) -> None:
    c = cluster(2)
    c.own_jobs()
    down = [r.end() for r in (c.begin(0, "suspend", json=False), c.begin(1, "suspend"))]
    assert [r.code for r in down] == [0, 0], down
    assert f"each other host: gpuckpt resume {c.ranks[0][0].pid} --rendezvous {c.url} --nodes 2 --node-rank 0\n" in down[0].stdout
    assert "_back" not in down[1].document
    assert [r.code for r in c.all("resume")] == [0, 0]


def key_file(path: Path, mode: int = 0o600) -> Path:
    path.write_bytes(os.urandom(32))
    path.chmod(mode)
    return path


def test_keys(cluster: Make, tmp_path: Path) -> None:
    c = cluster(2)
    c.own_jobs()
    ours, theirs = key_file(tmp_path / "ours"), key_file(tmp_path / "theirs")
    assert [r.code for r in c.all("suspend", "--rendezvous-key", ours)] == [0, 0]
    assert str(ours) in c.machines[0].gpuckpt("resume", c.ranks[0][0].pid).error["hint"]
    assert b'"mac": "' + b'"' not in next((c.path / "shared/job").glob("*.end.all")).read_bytes()
    running = [
        c.begin(0, "resume", "--rendezvous-key", ours, timeout="1500ms"),
        c.begin(1, "resume", "--rendezvous-key", theirs, timeout="1500ms"),
    ]
    results = [r.end() for r in running]
    assert "rendezvous-key" in {r.error["code"] for r in results}
    assert set(c.states()) == {CHECKPOINTED}
    assert [r.code for r in c.all("resume", "--rendezvous-key", ours)] == [0, 0]
    assert c.whole()


def test_where_others_can_write_a_key_is_needed(cluster: Make, tmp_path: Path) -> None:
    c = cluster(2)
    c.own_jobs()
    place = c.path / "shared" / "job"
    place.mkdir()
    place.chmod(0o777)
    result = c.begin(0, "suspend").end()
    assert (result.code, result.error["code"]) == (6, "rendezvous-key")
    readable = c.begin(0, "suspend", "--rendezvous-key", key_file(tmp_path / "key", 0o644)).end()
    assert (readable.code, readable.error["code"]) == (2, "usage")


@pytest.mark.parametrize(
    "words",
    [
        ("--rendezvous", "file:///tmp/x/y"),
        ("--nodes", "2"),
        ("--rendezvous", "ftp://x/y", "--nodes", "2"),
        ("--rendezvous", "file:///tmp/x/y", "--nodes", "1"),
        ("--rendezvous", "file:///tmp/x/y", "--nodes", "2", "--node-rank", "2"),
        ("--rendezvous", "file:///tmp/x/y", "--nodes", "2", "--dry-run"),
        ("--rendezvous", "c10d://localhost:1/y", "--nodes", "2", "--rendezvous-key", "/nowhere"),
    ],
)
def test_words_that_make_no_sense(words: tuple[str, ...], machine: Machine) -> None:
    result = machine.gpuckpt("suspend", "1", *words)
    assert (result.code, result.error["code"]) == (2, "usage")

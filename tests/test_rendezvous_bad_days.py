"""Several hosts on bad days: a coordinator that is killed, a store that is gone or silent."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuckpt.model import Call, State
from gpuckpt.rendezvous.coordinator import STEPS
from tests.hosts import Cluster, waits
from tests.simulated_machine import eventually
from tests.tcp_store import TCP_STORES, answers, free_port, needs_torch, serving, silence, use_tcp_store

RUNNING, LOCKED, CHECKPOINTED = State.RUNNING, State.LOCKED, State.CHECKPOINTED
Make = Callable[..., Cluster]


def killed_at(c: Cluster, step: str) -> None:
    """Node 1 is killed when it has voted for *step*; then all the others vote for it, and node 0 goes on."""
    c.own_jobs()
    puppet = c.puppet()
    running = [c.begin(h, "suspend") for h in range(2)]
    assert puppet.join()["go"]
    steps = puppet.coordinator.steps
    puppet.votes(*steps[2 : steps.index(step)])
    puppet.wait_for_votes(step)
    running[1].process.kill()
    running[1].end()
    puppet.votes(step)
    if step != "end":
        silent_at = steps[steps.index(step) + 1]
        puppet.give_up(silent_at, held=silent_at == "end")
    result = running[0].end()
    at, told = c.states(), f"killed at {step}: {result}"
    if step in ("comms", "disarm", "lock"):  # nothing was committed: everybody is back
        assert (result.code, result.error["code"]) == (124, "host-missing"), told
        assert f"(node 1) has not come to the step {silent_at!r}" in result.error["message"]
        assert at == [RUNNING, RUNNING]
        assert not c.machines[0].records()
        assert c.ranks[0][0].unharmed()
    elif step == "checkpoint":  # it may have been committed, as far as node 1 knows, and it was
        assert (result.code, result.error["code"]) == (3, "held"), told
        assert "(node 1) has not come to the step 'end'" in result.error["message"]
        assert at == [CHECKPOINTED, LOCKED]
    else:
        assert result.code == 0, told
        assert at == [CHECKPOINTED, CHECKPOINTED]
    recovered = c.machines[1].gpuckpt("recover")
    assert recovered.code == (3 if step == "checkpoint" else 0), recovered
    if step in ("comms", "disarm", "lock"):
        assert c.whole()
    if recovered.code:
        assert recovered.error["code"] == "held"
        assert f"gpuckpt resume {c.ranks[1][0].pid} --rendezvous" in recovered.error["hint"]
    back = c.puppet("resume")
    running = [c.begin(h, "resume") for h in range(2)]
    verdict = back.join(puppet.coordinator.id)
    if verdict["go"] and not verdict["already"]:
        back.votes(*back.coordinator.steps[2:])
    results = [r.end() for r in running]
    assert [r.code for r in results] == [0, 0], results
    assert c.whole()
    assert not any(m.records() for m in c.machines)


def test_a_coordinator_killed_at_each_step(cluster: Make) -> None:
    steps = ("comms", "disarm", "lock", "checkpoint", "end")
    clusters = [cluster(2, puppets=1) for _ in steps]
    with ThreadPoolExecutor(len(steps)) as pool:
        list(pool.map(killed_at, clusters, steps))


def test_ranks_of_a_killed_coordinator_wait_for_their_peers_in_nccl(cluster: Make) -> None:
    """Killed between comms and disarm, its ranks go back by themselves, and their communicator needs the ranks of the other host."""
    c = cluster(2, puppets=1)
    c.one_job(1)
    puppet = c.puppet()
    running = [c.begin(h, "suspend") for h in range(2)]
    assert puppet.join()["go"]
    puppet.votes("comms")
    puppet.wait_for_votes("disarm")
    running[1].process.kill()
    running[1].end()
    puppet.votes("disarm")
    puppet.give_up("lock", held=False)
    puppet.give_up("back-arm", held=True)
    result = running[0].end()
    assert (result.code, result.error["code"]) == (3, "held"), result
    back = c.puppet("resume")
    running = [c.begin(h, "resume") for h in range(2)]
    assert back.join(puppet.coordinator.id)["go"]
    back.votes(*back.coordinator.steps[2:])
    results = [r.end() for r in running]
    assert [r.code for r in results] == [0, 0], results
    assert c.whole()


@pytest.mark.parametrize(
    ("step", "kind"),
    [("comms", "fake"), ("disarm", "file"), ("lock", "fake"), ("checkpoint", "file"), ("end", "fake")]
    + [pytest.param(step, "torch", marks=needs_torch) for step in STEPS["suspend"][2:]],
)
def test_the_host_of_the_store_is_gone(cluster: Make, step: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its store, at each step. Before its vote for the commit a host goes back; after it, it holds, and comes back by another."""
    c = cluster(2, puppets=1)
    c.own_jobs()
    with contextlib.ExitStack() as ends:
        if kind == "file":
            serves = None
        else:
            use_tcp_store(kind, monkeypatch)
            serves = ends.enter_context(serving(port := free_port()))
            c.address = f"127.0.0.1:{port}"
        puppet = c.puppet()
        running = [c.begin(h, "suspend") for h in range(2)]
        puppet.join()
        puppet.votes(*puppet.coordinator.steps[2 : puppet.coordinator.steps.index(step)])
        puppet.wait_for_votes(step)
        if serves is None:
            (c.path / "shared" / "job").rename(c.path / "elsewhere")
        else:
            serves.kill()
        results = [r.end() for r in running]
    voted = step in ("checkpoint", "end")
    assert [(r.code, r.error["code"]) for r in results] == [(3, "held") if voted else (1, "rendezvous-lost")] * 2, results
    assert set(c.states()) == {{"checkpoint": LOCKED, "end": CHECKPOINTED}.get(step, RUNNING)}
    if not voted:
        assert c.whole()
        assert not any(m.records() for m in c.machines)
        return
    c.name, c.address = "another", ""
    back = c.puppet("resume")
    running = [c.begin(h, "resume") for h in range(2)]
    assert back.join(puppet.coordinator.id)["go"]
    back.votes(*back.coordinator.steps[2:])
    assert [r.end().code for r in running] == [0, 0]
    assert c.whole()


@pytest.mark.parametrize("kind", TCP_STORES)
@pytest.mark.parametrize("call", [Call.COMMS, Call.CHECKPOINT])
def test_the_host_that_serves_the_store_is_killed(cluster: Make, call: Call, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command, with the store in it, before the commit and after; four of eight ranks of one communicator are its own."""
    use_tcp_store(kind, monkeypatch)
    c = cluster(2, gpus=4)
    c.one_job(4)
    c.address = f"127.0.0.1:{free_port()}"
    slow, met = c.ranks[0][0], c.path / "meet/tp-1-suspend"
    c.machines[0].world.add_fault(call, pid=slow.pid, delay_s=2.0)
    serves = c.begin(0, "suspend")
    eventually(lambda: answers(c.address), "node 0 serves the store")
    other = c.begin(1, "suspend")
    if call is Call.COMMS:
        eventually(lambda: met.exists() and len(list(met.iterdir())) == 7, "seven ranks have come to their communicator")
    else:
        eventually(lambda: not c.machines[0].faults_left(), "the checkpoint of node 0 begins")
    serves.process.kill()
    serves.end()
    result = other.end()
    if call is Call.COMMS:
        assert (result.code, result.error["code"]) == (1, "rendezvous-lost"), result
    else:
        assert (result.code, result.error["code"]) == (3, "held"), result
        eventually(lambda: not c.machines[0].world.peek().operations, "what the driver was asked for has ended")
        c.address = f"127.0.0.1:{free_port()}"
        results = c.all("resume")
        assert [r.code for r in results] == [0, 0], results
    assert c.whole()
    c.machines[0].gpuckpt("recover")
    assert not any(m.records() for m in c.machines)


def test_a_store_that_says_nothing_keeps_no_command(cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tcp_store("fake", monkeypatch)
    c = cluster(1)
    c.own_jobs()
    with serving(port := free_port()) as host:
        c.address = f"127.0.0.1:{port}"
        silence(host)
        result = c.begin(0, "suspend", timeout="500ms", nodes=2).end()
    assert (result.code, result.error["code"]) == (1, "rendezvous-lost"), result
    assert c.whole()


def test_a_command_that_was_killed_at_the_meeting_gives_way_to_the_next(cluster: Make) -> None:
    c = cluster(2)
    c.own_jobs()
    killed = c.begin(0, "suspend")
    waits(c, 0)
    killed.process.kill()
    killed.end()
    other = c.begin(1, "suspend")  # it meets the one that is dead, and waits for its next word
    waits(c, 1)
    again = c.begin(0, "suspend")
    results = [again.end(), other.end()]
    assert [r.code for r in results] == [0, 0], results
    assert [r.code for r in c.all("resume")] == [0, 0]
    assert c.whole()


def test_two_on_one_place(cluster: Make) -> None:
    c = cluster(2)
    c.own_jobs()
    first = c.begin(0, "suspend")
    waits(c, 0)
    c.ranks[0], c.ranks[1] = c.ranks[1], c.ranks[0]
    c.machines[0], c.machines[1] = c.machines[1], c.machines[0]
    second = c.begin(0, "suspend", timeout="1s").end()
    assert (second.code, second.error["code"]) == (124, "concurrent-operation"), second
    assert "has the place of node 0" in second.error["message"]
    wrong = c.begin(0, "suspend", timeout="1s", nodes=3).end()
    assert (wrong.code, wrong.error["code"]) == (2, "usage")
    first.signal(signal.SIGINT)
    assert first.end().code == 130
    assert c.whole()

"""Suspend and resume act in order, prove what NCCL says, and tell how each communicator was left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

BEGIN = """
from gpuckpt.errors import exit_code
from gpuckpt.nccl.suspend import needed_host_bytes, resume, suspend
new = opened("new/libnccl.so.2")
a, b, c = comms = [communicator(new, name, carried=True) for name in "abc"]
steps = []
def progress(c, step):
    steps.append(f"{step} {c.name}")
def told(outcome):
    e = outcome.error
    return {**outcome.as_dict(), "exit": exit_code(e) if e else 0}
def states():
    return [x.library.stats(x.pointer).suspended for x in comms]
"""


@pytest.fixture
def run(nccl_run: Run) -> Run:
    return lambda code, **environ: nccl_run(BEGIN + code, **environ)


def test_a_cycle(run: Run) -> None:
    out = run("""
out["needed"] = needed_host_bytes(comms)
down = suspend(comms, progress)
out["down"], out["states"] = told(down), states()
out["needed suspended"] = needed_host_bytes(comms)
out["up"], out["after"] = told(resume(down.done, progress)), states()
out["steps"], out["calls"] = steps, calls()
""")
    labels = ["registered:a", "registered:b", "registered:c"]
    for way in ("down", "up"):
        assert out[way] == {
            "done": labels,
            "already": [],
            "broken": None,
            "untouched": [],
            "nbytes": 3 * (480 << 20),
            "error": None,
            "exit": 0,
        }
    assert (out["states"], out["after"]) == ([True] * 3, [False] * 3)
    assert (out["needed"], out["needed suspended"]) == ([480 << 20] * 3, [0] * 3)
    assert out["steps"][:4] == ["suspend a", "suspended a", "suspend b", "suspended b"]
    assert out["steps"][6:8] == ["resume a", "resumed a"]
    assert out["calls"] == [f"libnccl.so.2 ncclComm{verb} {n}" for verb in ("Suspend", "Resume") for n in "abc"]


def test_asked_twice_it_is_done_once(run: Run) -> None:
    out = run("""
out["up"] = told(resume(comms))
suspend(comms)
out["down"] = told(suspend(comms))
resume(comms)
out["up again"] = told(resume(comms))
out["calls"] = len(calls())
""")
    for way in ("up", "down", "up again"):
        assert (out[way]["done"], len(out[way]["already"]), out[way]["error"]) == ([], 3, None)
    assert out["calls"] == 6


def test_what_was_found_suspended_stays_so(run: Run) -> None:
    """vLLM may have suspended its own while asleep: its wake resumes them, not we."""
    out = run("""
suspend([b])
down = suspend(comms)
resume(down.done)
out = states()
""")
    assert out == [False, True, False]


@pytest.mark.parametrize("result", [1, 2, 3, 6])
def test_a_suspend_that_breaks_half_way(run: Run, result: int) -> None:
    out = run("""out = [told(suspend(comms)), states()]""", FAKE_NCCL_ncclCommSuspend_b=str(result))
    told, states = out
    assert (told["done"], told["broken"], told["untouched"]) == (["registered:a"], "registered:b", ["registered:c"])
    assert (told["error"]["code"], told["exit"]) == ("communicator-broken", 3)
    for word in ("registered:b", "rank 0 of 2", "suspended: registered:a", "not come to: registered:c"):
        assert word in told["error"]["message"]
    assert states == [True, False, False]


@pytest.mark.parametrize("result", [4, 5])
def test_a_refusal_by_nccl_breaks_nothing(run: Run, result: int) -> None:
    """splitShare, or its memory manager off: those already down can go up again."""
    out = run(
        """
down = suspend(comms)
out["down"] = told(down)
out["up"] = told(resume(down.done))
out["states"] = states()
""",
        FAKE_NCCL_ncclCommSuspend_b=str(result),
    )
    assert (out["down"]["broken"], out["down"]["untouched"]) == (None, ["registered:b", "registered:c"])
    assert (out["down"]["error"]["code"], out["down"]["exit"]) == ("nccl-communicator", 6)
    assert "splitShare" in out["down"]["error"]["hint"]
    assert out["up"]["done"] == ["registered:a"]
    assert out["states"] == [False] * 3


def test_a_suspend_that_only_says_so(run: Run) -> None:
    out = run("""out = told(suspend(comms))""", FAKE_NCCL_IDLE="b")
    assert (out["broken"], out["error"]["code"]) == ("registered:b", "communicator-broken")
    assert "counts the communicator as active" in out["error"]["message"]


def test_legacy_ipc_is_refused_before_it_is_too_late(run: Run) -> None:
    out = run("""
for name, numbers in {"no cuMem": dict(suspendable=0, total=0), "carried, none suspendable": dict(suspendable=0, total=9)}.items():
    out[name] = told(suspend([communicator(new, name, carried=True, **numbers)]))
out["not carried"] = told(suspend([communicator(new, "idle", suspendable=0, total=9)]))
out["calls"] = len(calls())
""")
    for name in ("no cuMem", "carried, none suspendable"):
        assert (out[name]["broken"], out[name]["untouched"]) == (None, [f"registered:{name}"])
        assert (out[name]["error"]["code"], out[name]["exit"]) == ("nccl-communicator", 6)
        assert "gpuckpt env" in out[name]["error"]["hint"]
    assert out["not carried"]["error"] is None
    assert out["calls"] == 1


def test_a_resume_without_room_can_be_asked_again(run: Run) -> None:
    out = run("""
suspend(comms)
os.environ["FAKE_NCCL_ncclCommResume_b"] = "1"
out["first"] = told(resume(comms))
out["states"] = states()
del os.environ["FAKE_NCCL_ncclCommResume_b"]
out["second"] = told(resume(comms))
out["after"] = states()
""")
    assert (out["first"]["done"], out["first"]["broken"], out["first"]["exit"]) == (["registered:a"], "registered:b", 3)
    assert out["first"]["untouched"] == ["registered:c"]
    assert out["states"] == [False, True, True]
    assert (out["second"]["already"], out["second"]["done"]) == (["registered:a"], ["registered:b", "registered:c"])
    assert out["after"] == [False] * 3


def test_an_old_nccl(run: Run) -> None:
    out = run("""
old = opened("old/libnccl.so.2")
mixed = [a, communicator(old, "old"), c]
out = told(suspend(mixed))
out["needed"] = needed_host_bytes(mixed)
""")
    assert (out["done"], out["broken"], out["untouched"]) == (["registered:a"], None, ["registered:old", "registered:c"])
    assert (out["error"]["code"], out["needed"]) == ("nccl-communicator", [0, 0, 480 << 20])


def test_each_copy_is_called_on_its_own_communicators_only(run: Run) -> None:
    """The fakes end the process otherwise."""
    out = run("""
plain = opened("plain/libnccl.so.2")
mixed = [a, communicator(plain, "p"), b]
down = suspend(mixed)
resume(down.done)
out = [down.ok, [x.library.version for x in mixed]]
""")
    assert out == [True, ["2.30.7", "2.29.7", "2.30.7"]]


def test_an_outcome_can_be_raised(run: Run) -> None:
    out = run(
        """
from gpuckpt.errors import CommunicatorBroken
suspend([]).raise_for_error()
try:
    suspend(comms).raise_for_error()
except CommunicatorBroken as error:
    out = error.code
""",
        FAKE_NCCL_ncclCommSuspend="1",
    )
    assert out == "communicator-broken"

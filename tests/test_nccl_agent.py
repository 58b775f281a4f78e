"""What an agent does with the communicators of a real program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., Any]

BEGIN = """
import gpuckpt.nccl.verify as v
from gpuckpt.agent.nccl import NcclCommunicators
from gpuckpt.nccl.communicators import register
verified = []
sys.modules["torch"] = Torch(initialised=False)
v.verify = lambda communicators, deadline_s: verified.extend(c.label for c in communicators)
new = opened("new/libnccl.so.2")
"""
#: And an agent's view of two communicators, a and b.
TWO = (
    BEGIN
    + """
for name in "ab":
    c = communicator(new, name, carried=True)
    register(c.pointer, c.library.path, name=name, carried=True)
a = NcclCommunicators()
"""
)


def test_a_program_without_communicators(nccl_run: Run) -> None:
    out = nccl_run(
        BEGIN
        + """
a = NcclCommunicators()
out["seen"] = [a.describe(), a.hazards()]
a.synchronise(), a.suspend(), a.resume()
out["verified"] = verified
"""
    )
    assert out == {"seen": [[], []], "verified": []}


def test_suspended_resumed_and_proven(nccl_run: Run) -> None:
    out = nccl_run(
        TWO
        + """
out["seen"], out["held"] = a.describe(), [a.held_bytes()]
a.suspend()
out["while"] = [{**c, "host_bytes": 480 << 20} for c in a.describe()] == out["seen"], a.hazards()
out["held"].append(a.held_bytes())
a.resume()
out["verified"], out["calls"] = verified, calls()
"""
    )
    assert [c["name"] for c in out["seen"]] == ["registered:a", "registered:b"]
    assert out["held"] == [2 * (480 << 20) + 14, 14]
    assert out["while"] == [True, []]
    assert out["verified"] == ["registered:a", "registered:b"]
    assert [c.split()[1] for c in out["calls"] if "Suspend" in c or "Resume" in c] == ["ncclCommSuspend"] * 2 + ["ncclCommResume"] * 2


def test_what_could_not_be_proven_is_not_suspended(nccl_run: Run) -> None:
    """A program that has NCCL from elsewhere than torch would find out at its resume, and be lost."""
    out = nccl_run(TWO + """out = [a.hazards()]; del sys.modules["torch"]; out.append(a.hazards())""")
    assert [["import torch" in words for words in said].count(True) for said in out] == [0, 1]


def test_one_of_a_single_rank_is_named_and_left_as_it_is(nccl_run: Run) -> None:
    out = nccl_run(
        BEGIN
        + """
for name, size in (("own", 1), ("both", 2)):
    c = communicator(new, name, size=size, carried=True)
    register(c.pointer, c.library.path, name=name, carried=True)
a = NcclCommunicators()
out["seen"] = a.describe()
a.suspend()
out["while"], out["held"] = a.describe(), a.held_bytes()
a.resume()
out["verified"], out["calls"] = verified, calls()
"""
    )
    assert [(c["name"], c["size"], c["host_bytes"]) for c in out["seen"]] == [("registered:both", 2, 480 << 20), ("registered:own", 1, 0)]
    assert [c["name"] for c in out["while"]] == ["registered:both", "registered:own"]
    assert out["held"] == (480 << 20) + 14, "that of one rank keeps all"
    assert (out["verified"], [c.split()[2] for c in out["calls"]]) == (["registered:both"], ["both", "both"])


def test_a_library_that_does_not_tell_what_its_communicators_hold(nccl_run: Run) -> None:
    out = nccl_run(
        BEGIN
        + """
for name in ("old", "new"):
    c = communicator(opened(f"{name}/libnccl.so.2"), name, carried=True)
    register(c.pointer, c.library.path, name=name, carried=True)
out["held"] = NcclCommunicators().held_bytes()
"""
    )
    assert out["held"] == (480 << 20) + 7


def test_a_suspend_that_nccl_refuses_leaves_all_as_found(nccl_run: Run) -> None:
    """Half-way: what was suspended before comes back and is proven, and what is hazardous is still looked at."""
    out = nccl_run(
        BEGIN
        + """
from gpuckpt.agent.communicators import AsFoundError
made = []
for name in "abc":
    made.append(communicator(new, name, carried=True))
    register(made[-1].pointer, made[-1].library.path, name=name, carried=True)
a = NcclCommunicators()
before = a.hazards()
try:
    a.suspend()
except AsFoundError as e:
    out["said"] = str(e)
out["suspended"] = [c.library.stats(c.pointer).suspended for c in made]
out["same_hazards"], out["verified"] = a.hazards() == before, verified
""",
        FAKE_NCCL_ncclCommSuspend_b="5",
    )
    assert "refuses to suspend registered:b" in out["said"]
    assert (out["suspended"], out["same_hazards"], out["verified"]) == ([False] * 3, True, ["registered:a"])


def test_what_cannot_come_back_after_a_refusal_stays_a_hazard(nccl_run: Run) -> None:
    out = nccl_run(
        TWO
        + """
from gpuckpt.agent.communicators import AsFoundError
try:
    a.suspend()
except Exception as e:
    out["said"], out["as_found"] = str(e), isinstance(e, AsFoundError)
out["hazards"] = a.hazards()
""",
        FAKE_NCCL_ncclCommSuspend_b="5",
        FAKE_NCCL_ncclCommResume_a="3",
    )
    assert "registered:a (rank 0 of 2) broke while it was to be resumed" in out["said"]
    assert out["as_found"] is False
    assert "refuses to suspend registered:b" in out["hazards"][0]


def test_one_that_breaks_stays_a_hazard(nccl_run: Run) -> None:
    out = nccl_run(
        BEGIN
        + """
c = communicator(new, "a", carried=True)
register(c.pointer, c.library.path, name="a", carried=True)
a = NcclCommunicators()
try:
    a.suspend()
except Exception as e:
    out["said"] = str(e)
out["hazards"] = a.hazards()
""",
        FAKE_NCCL_ncclCommSuspend_a="3",
    )
    assert "registered:a (rank 0 of 2) broke while it was to be suspended" in out["said"]
    assert out["hazards"] == [out["said"]]


def test_what_vllm_has_suspended_itself_stays_so_and_is_vouched_for(nccl_run: Run) -> None:
    """A server asleep with --enable-nccl-comm-suspend (vLLM 0.30): its own wake-up brings them back, not our resume."""
    out = nccl_run(
        BEGIN
        + """
for name in "ab":
    c = communicator(new, name, carried=True)
    register(c.pointer, c.library.path, name=name, carried=True)
    if name == "a":
        c.library.suspend(c.pointer)
a = NcclCommunicators()
out["seen"] = a.describe(), a.hazards()
a.suspend()
out["while"] = [c["name"] for c in a.describe()]
a.resume()
out["verified"], out["calls"] = verified, calls()
"""
    )
    assert [c["name"] for c in out["seen"][0]] == out["while"] == ["registered:a", "registered:b"]
    assert not [h for h in out["seen"][1] if "registered:" in h], "that of the environment aside"
    assert out["verified"] == ["registered:b"]
    assert [c.split()[1:] for c in out["calls"]] == [["ncclCommSuspend", "a"], ["ncclCommSuspend", "b"], ["ncclCommResume", "b"]]

"""The simulated driver's rules, in memory: they are what the real one was measured to follow."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuckpt.driver.api import CallError
from gpuckpt.driver.simulated import Rules, SimulatedGpu
from gpuckpt.model import IMAGE_CALLS, Call, State
from gpuckpt.plan import AGENT_CALLS

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = "GPU-a", "GPU-b"


def machine(**of_every_gpu: Any) -> Rules:
    gpus = [SimulatedGpu(uuid, index, total_bytes=100, **of_every_gpu) for index, uuid in enumerate((A, B))]
    return Rules.of(gpus, alive={2}.__contains__)


def refusal(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CallError) as caught:
        call(*args, **kwargs)
    return caught.value.result


def suspended(rules: Rules, pid: int = 1, held: dict[str, int] | None = None, traits: tuple[str, ...] = (), exported: int = 0) -> None:
    rules.register(pid, 7, held or {A: 60}, traits, exported)
    rules.lock(pid)
    rules.checkpoint(pid)


def assert_lost(rules: Rules, pid: int = 1) -> None:
    assert refusal(rules.restore, pid, {}) == "OPERATING_SYSTEM"
    assert refusal(rules.unlock, pid) == "ILLEGAL_STATE"
    assert rules.state(pid) is State.CHECKPOINTED
    assert rules.processes[pid].lost


class TestRules:
    def test_a_cycle_frees_and_takes_again(self) -> None:
        rules = machine()
        suspended(rules, held={A: 60, B: 10})
        assert (rules.used(A), rules.used(B), rules.processes[1].image_bytes) == (0, 0, 70)
        rules.restore(1, {})
        assert (rules.used(A), rules.free(B), rules.state(1)) == (60, 90, State.LOCKED)
        rules.unlock(1)
        assert rules.state(1) is State.RUNNING

    def test_wrong_states(self) -> None:
        rules = machine()
        rules.register(1, 7, {A: 1})
        for call in (rules.unlock, rules.checkpoint, lambda pid: rules.restore(pid, {})):
            assert refusal(call, 1) == "ILLEGAL_STATE"
        rules.lock(1)
        assert refusal(rules.lock, 1) == "ILLEGAL_STATE"

    @pytest.mark.parametrize(("pid", "result"), [(2, "NOT_INITIALIZED"), (3, "OPERATING_SYSTEM")])
    def test_without_cuda_state(self, pid: int, result: str) -> None:
        rules = machine()
        for call in (rules.state, rules.lock, rules.checkpoint, rules.unlock, lambda pid: rules.restore(pid, {})):
            assert refusal(call, pid) == result

    @pytest.mark.parametrize("mig", [False, True])
    def test_a_refused_checkpoint_stays_locked_and_never_says_why_again(self, mig: bool) -> None:
        rules = machine(mig=mig)
        rules.register(1, 7, {A: 60}, () if mig else ("managed",))
        rules.lock(1)
        assert [refusal(rules.checkpoint, 1) for _ in range(3)] == ["NOT_SUPPORTED", "UNKNOWN", "UNKNOWN"]
        assert (rules.state(1), rules.used(A)) == (State.LOCKED, 60)
        rules.unlock(1)

    @pytest.mark.parametrize(("trait", "result"), [("import", "INVALID_VALUE"), ("communicator", "NOT_SUPPORTED")])
    def test_a_checkpoint_that_can_never_be_restored(self, trait: str, result: str) -> None:
        rules = machine()
        suspended(rules, traits=(trait,))
        assert refusal(rules.restore, 1, {}) == result
        assert_lost(rules)

    def test_too_little_room_on_any_gpu_loses_the_process_for_ever(self) -> None:
        rules = machine()
        suspended(rules, held={A: 60, B: 60})
        rules.register(9, 7, {B: 41})
        assert refusal(rules.restore, 1, {}) == "OUT_OF_MEMORY"
        assert rules.used(A) == 0
        rules.forget(9)
        assert_lost(rules)

    def test_an_exported_handle_leaks_once(self) -> None:
        rules = machine()
        suspended(rules, exported=20)
        assert rules.used(A) == 20
        rules.restore(1, {})
        assert rules.used(A) == 80
        rules.checkpoint(1)
        assert rules.used(A) == 20
        rules.forget(1)
        assert rules.used(A) == 0

    def test_what_an_exported_handle_holds_stays_where_it_was(self) -> None:
        rules = machine()
        suspended(rules, exported=20)
        rules.restore(1, {A: B, B: A})
        rules.checkpoint(1)
        assert (rules.used(A), rules.used(B)) == (20, 0)

    def test_a_map_moves_the_bytes(self) -> None:
        rules = machine()
        suspended(rules, held={A: 60, B: 5})
        rules.restore(1, {A: B, B: A})
        assert list(rules.processes[1].held_bytes.items()) == [(B, 60), (A, 5)]

    @pytest.mark.parametrize("gpu_map", [{A: B}, {A: A, B: A}, {A: B, B: "GPU-c"}, {A: A, B: B, "GPU-c": "GPU-c"}])
    def test_a_map_that_is_no_permutation_costs_nothing(self, gpu_map: dict[str, str]) -> None:
        rules = machine()
        suspended(rules)
        assert refusal(rules.restore, 1, gpu_map) == "INVALID_VALUE"
        rules.restore(1, {A: B, B: A})

    def test_a_map_leaves_a_lost_gpu_out(self) -> None:
        rules = machine()
        suspended(rules)
        rules.gpus[B].lost = True
        assert refusal(rules.restore, 1, {A: A, B: B}) == "INVALID_VALUE"
        rules.restore(1, {A: A})

    def test_another_chip_loses_the_process(self) -> None:
        rules = machine()
        rules.gpus[B].name = "Another GPU"
        suspended(rules)
        assert refusal(rules.restore, 1, {A: B, B: A}) == "INVALID_VALUE"
        assert_lost(rules)

    @pytest.mark.parametrize(
        ("mode", "other", "fits"), [("prohibited", 0, False), ("exclusive-process", 1, False), ("exclusive-process", 0, True)]
    )
    def test_compute_modes(self, mode: str, other: int, fits: bool) -> None:
        rules = machine()
        suspended(rules)
        if other:
            rules.register(9, 7, {A: other})
        rules.gpus[A].compute_mode = mode
        if fits:
            rules.restore(1, {})
        else:
            assert refusal(rules.restore, 1, {}) == "DEVICE_UNAVAILABLE"
            assert_lost(rules)

    def test_a_lost_gpu(self) -> None:
        rules = machine()
        suspended(rules)
        rules.register(9, 7, {A: 1})
        rules.lock(9)
        rules.gpus[A].lost = True
        assert refusal(rules.checkpoint, 9) == "UNKNOWN"
        assert refusal(rules.restore, 1, {}) == "DEVICE_UNAVAILABLE"
        assert_lost(rules)

    def test_without_persistence_mode_a_restore_needs_initialisation(self) -> None:
        rules = machine(persistence=False)
        suspended(rules)
        assert refusal(rules.restore, 1, {}, initialise=False) == "NOT_INITIALIZED"
        rules.restore(1, {}, initialise=True)

    def test_a_process_that_only_loaded_the_driver_runs_and_holds_nothing(self) -> None:
        rules = machine()
        suspended(rules, traits=("contextless",))
        assert rules.processes[1].image_bytes == 0
        rules.restore(1, {})
        rules.unlock(1)
        assert (rules.state(1), rules.used(A)) == (State.RUNNING, 0)

    def test_allocations_need_room(self) -> None:
        rules = machine()
        assert refusal(rules.register, 1, 7, {A: 101}) == "OUT_OF_MEMORY"
        assert not rules.processes
        rules.register(1, 7, {A: 60})
        rules.alloc(1, 40)
        assert refusal(rules.alloc, 1, 1) == "OUT_OF_MEMORY"
        assert rules.free(A) == 0

    @pytest.mark.parametrize("bad", [{"traits": ("exported",)}, {"exported_bytes": 2}])
    def test_registering_nonsense(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"trait|exported"):
            machine().register(1, 7, {A: 1}, **bad)


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class AnySchedule(RuleBasedStateMachine):
    """Any calls in any order: memory adds up, only a call that succeeded changes a state, the lost stay lost."""

    pids = st.integers(1, 3)
    follows: ClassVar = {
        Call.LOCK: State.LOCKED,
        Call.CHECKPOINT: State.CHECKPOINTED,
        Call.RESTORE: State.LOCKED,
        Call.UNLOCK: State.RUNNING,
    }

    def __init__(self) -> None:
        super().__init__()
        self.simulated = machine()
        self.states: dict[int, State] = {}
        self.lost: set[int] = set()

    @rule(
        pid=pids,
        a=st.integers(0, 70),
        b=st.integers(0, 70),
        traits=st.sets(st.sampled_from(["managed", "import", "communicator", "contextless"]), max_size=1),
        exported=st.integers(0, 20),
    )
    def register(self, pid: int, a: int, b: int, traits: set[str], exported: int) -> None:
        if pid in self.states:
            return
        with contextlib.suppress(CallError):
            self.simulated.register(pid, 7, {A: a, B: b}, traits, 0 if traits else min(a, exported))
            self.states[pid] = State.RUNNING

    @rule(pid=pids)
    def forget(self, pid: int) -> None:
        if pid in self.lost:
            return  # it would be gone before anything could bring it back
        self.simulated.forget(pid)
        self.states.pop(pid, None)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), swap=st.booleans())
    def suspend_or_resume(self, data: st.DataObject, swap: bool) -> None:
        pid = data.draw(st.sampled_from(sorted(self.states)))
        down = self.states[pid] is State.RUNNING
        for call in (Call.LOCK, Call.CHECKPOINT) if down else (Call.RESTORE, Call.UNLOCK):
            self.call(pid, call, swap)

    @rule(pid=pids, call=st.sampled_from(sorted(set(Call) - AGENT_CALLS - IMAGE_CALLS)), swap=st.booleans())
    def any_call(self, pid: int, call: Call, swap: bool) -> None:
        self.call(pid, call, swap)

    def call(self, pid: int, call: Call, swap: bool) -> None:
        before = self.simulated.to_json()
        try:
            if call is Call.RESTORE:
                self.simulated.restore(pid, {A: B, B: A} if swap else {})
            else:
                getattr(self.simulated, call)(pid)
        except CallError as error:
            if call is Call.RESTORE and pid in self.states and error.result not in ("ILLEGAL_STATE", "OPERATING_SYSTEM"):
                self.lost.add(pid)
            elif error.result != "NOT_SUPPORTED":
                assert self.simulated.to_json() == before
        else:
            assert pid not in self.lost
            self.states[pid] = self.follows[call]

    @rule(pid=pids, nbytes=st.integers(0, 30))
    def alloc(self, pid: int, nbytes: int) -> None:
        with contextlib.suppress(CallError):
            self.simulated.alloc(pid, nbytes)

    @precondition(lambda self: self.simulated.processes)
    @rule()
    def through_json(self) -> None:
        again = Rules.from_json(json.loads(json.dumps(self.simulated.to_json())), alive={2}.__contains__)
        assert again == self.simulated
        self.simulated = again

    @invariant()
    def memory_adds_up(self) -> None:
        for uuid in (A, B):
            assert 0 <= self.simulated.used(uuid) <= 100
            assert self.simulated.used(uuid) + self.simulated.free(uuid) == 100

    @invariant()
    def states_are_as_called(self) -> None:
        assert {pid: self.simulated.state(pid) for pid in self.simulated.processes} == self.states
        assert {pid for pid, p in self.simulated.processes.items() if p.lost} == self.lost


TestAnySchedule = AnySchedule.TestCase

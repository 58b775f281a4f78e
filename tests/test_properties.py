"""Whatever goes wrong: every process ends as it was found, or suspended and restorable, or named, or dead.

The real plan, walk, operation, recovery and record types, against a machine in memory with numbered crash points
(``memory_world.py``). A failing schedule is printed whole, to be kept below as an example.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, currently_in_test_context, given, settings
from hypothesis import note as hypothesis_note
from hypothesis.strategies import SearchStrategy

from gpuckpt import errors
from gpuckpt.journal import Record
from gpuckpt.model import Report, State, Status
from gpuckpt.operation import Operation
from gpuckpt.plan import AGENT_STAGES
from gpuckpt.preview import Preview
from gpuckpt.recovery import recover_all, unfinished
from gpuckpt.words import BY_POOL
from tests.memory_machine import Fault
from tests.memory_world import MemoryWorld, described
from tests.schedules import FIRST_PID, TIGHT_GIB, Event, Played, Player, Proc, Schedule, Step, pools, ranks, schedules

if TYPE_CHECKING:
    from collections.abc import Callable

AS_FOUND = (1, 5, 6, 124, 130)


def note(text: str) -> None:
    """Say *text* if this schedule fails."""
    (hypothesis_note if currently_in_test_context() else print)(text)


def check(
    schedule: Schedule, players: type[Player] = Player, at_the_end: Callable[[Player, dict[int, str]], None] = lambda _, __: None
) -> None:
    """Play *schedule*, recover as a user would, and hold the end against what is promised.

    *at_the_end* is told the player and who was called what, when all trouble is over and before the rest is resumed.
    """
    player = players.of(schedule)
    machine, start = player.machine, player.states()
    named: dict[int, str] = {}
    for step in schedule.steps:
        belongs = {m.id.pid: m.found for r in machine.counting() if r.status is not Status.SUSPENDED for m in r.members}
        resuming = {m.id.pid for r in machine.counting() if r.status is Status.RESUMING for m in r.members}
        played = player.play(step)
        note(f"{step.command}: exit {played.code}, {played.error!r}, {played.after}, {[described(r) for r in machine.counting()]}")
        check_lost(player, played)
        check_exit(played, {**belongs, **dict.fromkeys(resuming, State.RUNNING)})
        tell(named, played)
    machine.run(float("inf"))
    recovered = player.recover()
    note(f"recover: {[r.details['recovered'] for r in recovered.reports]}, {player.states()}")
    tell(named, recovered)
    check_locks(player, start, named)
    machine.mend()
    for _ in range(2):
        recovered = player.recover()
        note(f"recover: {[r.details['recovered'] for r in recovered.reports]}, {player.states()}")
        machine.run(float("inf"))
        tell(named, recovered)
    check_end(player, start, named, recovered)
    at_the_end(player, named)
    check_restorable(player)
    assert not machine.wrongs, machine.wrongs
    assert not machine.claims
    assert machine.dropped <= set(machine.files), "an image is neither in memory nor on disk"


def tell(named: dict[int, str], played: Played) -> None:
    """Add what the command said. Who was once called lost has been, even if a full disk made gpuckpt forget it."""
    named.update({pid: word for pid, word in played.words.items() if named.get(pid) != "lost"})


def check_lost(player: Player, played: Played) -> None:
    """Nobody is called lost who could come back: the advice for the lost is to kill them."""
    known = player.machine.rules.processes
    called = {pid for pid, word in played.words.items() if word == "lost"}
    if isinstance(played.error, errors.Lost) and played.error.pid is not None:
        called.add(played.error.pid)
    assert all(known[pid].lost for pid in called if pid in known), f"called lost, and is not: {called}"


def check_exit(played: Played, belongs: dict[int, State]) -> None:
    """The exit code agrees with what became of the processes, unless another command had its hand in.

    Where an operation had been left in the middle, a process may also have been brought to where it *belongs*.
    """
    if played.code is None or played.disturbed or played.step.command == "recover":
        return
    alive = {pid: state for pid, state in played.after.items() if pid in played.before}
    if played.code in AS_FOUND:
        for pid, state in alive.items():
            assert state in (played.before[pid], belongs.get(pid)), f"{pid} is {state} after exit {played.code}"
    if played.code == 0:
        goal = "suspended" if played.step.command == "suspend" else "running"
        told = {w.removesuffix(" (pool)") for w in played.words.values() if w != "gone"}
        assert told <= {goal, "lost"} if played.step.command == "suspend" else told <= {goal}
        for pid, word in played.words.items():
            meant = {"suspended": State.CHECKPOINTED, BY_POOL: State.DISARMED}.get(word, State.RUNNING)
            assert word in ("gone", "lost") or alive.get(pid, meant) is meant
    if played.code == 3:
        assert played.error is not None
        assert played.error.pid or played.words


def check_locks(player: Player, start: dict[int, State], named: dict[int, str]) -> None:
    """No process is left locked that ran before, unless somebody says so."""
    members = {m.id.pid for r in player.machine.counting() for m in r.members}
    for pid, state in player.states().items():
        if state is State.LOCKED and start.get(pid) is not State.LOCKED:
            assert pid in members or named.get(pid) in ("in-flight", "locked"), f"{pid} is locked and nobody says so"


def check_end(player: Player, start: dict[int, State], named: dict[int, str], last: Played) -> None:
    """After all trouble is over and ``gpuckpt recover`` ran: states, and a journal that tells the truth."""
    rules, records = player.machine.rules, player.machine.counting()
    inside = [m.id.pid for r in records for m in r.members]
    assert len(inside) == len(set(inside)), "a process is in two records"
    lost = {p.pid for p in rules.processes.values() if p.lost}
    assert lost <= player.machine.may_be_lost, "lost by gpuckpt"
    for pid, state in player.states().items():
        if pid in lost:
            assert named.get(pid) == "lost" or pid in inside or start.get(pid) is State.CHECKPOINTED, f"{pid} is lost and nobody says so"
        elif state is State.LOCKED:
            assert start.get(pid) is State.LOCKED
        elif state in AGENT_STAGES:
            assert pid in inside, f"its agent holds {pid} and no record says so"
        elif state is State.RUNNING and player.machine.has_agent(pid):
            assert not player.machine.agents[pid].offloaded, f"{pid} runs without its memory"
        elif state is State.CHECKPOINTED:
            assert start.get(pid) is State.CHECKPOINTED or pid in inside, f"{pid} is suspended and no record says so"
        elif state is State.RUNNING and start.get(pid) is State.CHECKPOINTED:
            assert "resume" in player.ran, f"{pid} was resumed although nobody asked"
    for record in records:
        check_record(record, player, lost | {pid for pid, agent in player.machine.agents.items() if agent.lost})
    world = MemoryWorld(player.machine)
    unheard = {pid for pid, agent in player.machine.agents.items() if agent.lost}
    left = [r for r in unfinished(world) if not any(m.lost or m.id.pid in unheard for m in r.members)]
    full = player.schedule.gpu_gib == TIGHT_GIB and any(r.error and r.error["step"] in ("room", "onload") for r in last.reports)
    assert not left or full, [described(r) for r in left]


def check_record(record: Record, player: Player, lost: set[int]) -> None:
    states = player.states()
    alive = {m.id.pid: m for m in record.members if m.id.pid in states}
    assert alive, f"a record of the dead: {described(record)}"
    assert all(m.id.pid in lost for m in alive.values() if m.lost), f"called lost, and is not: {described(record)}"
    away = {record.down, State.OFFLOADED, State.DISARMED}  # without room it may have come back no further
    assert any(states[pid] in away or pid in lost for pid in alive), f"a record of a group that runs: {described(record)}"
    if record.status is Status.SUSPENDED:
        assert all(states[pid] is record.down or pid in lost for pid in alive), f"not suspended: {described(record)}"
    assert not record.retained, f"nothing was exported: {described(record)}"


def check_restorable(player: Player) -> None:
    """Whatever is suspended comes back when it is asked to."""
    player.machine.mend()
    doomed = player.machine.may_be_lost
    for pid in player.states():
        if player.states()[pid] in (State.CHECKPOINTED, State.DISARMED, State.OFFLOADED):
            played = player.play(Step("resume", (pid,)))
            note(f"resume {pid}: exit {played.code}, {played.error!r}")
            full = player.schedule.gpu_gib == TIGHT_GIB and isinstance(played.error, errors.GpuMemory)
            if player.states()[pid] is not State.RUNNING and not full:
                assert pid in doomed, f"{pid} does not come back"
                assert played.code == 3
                assert any(a.lost for a in player.machine.agents.values()) or played.words[pid] == "lost"
    for record in player.machine.counting():
        assert player.schedule.gpu_gib == TIGHT_GIB or any(m.id.pid in doomed for m in record.members), (
            f"all of it runs again: {described(record)}"
        )


RUNNING, LOCKED, CHECKPOINTED = State.RUNNING, State.LOCKED, State.CHECKPOINTED
PAIR = (Proc(gib=6), Proc(gib=6))

#: Schedules that once ended badly, by what went wrong.
EXAMPLES = {
    "a refused command kept its claims": Schedule((Proc(),), (Step("suspend", events=(Event(0, "stop"),)),)),
    "recover never had enough of a group of which one had died": Schedule(PAIR, (Step("suspend", events=(Event(0, "die", after_s=1.5),)),)),
    "an unlock failed on the way back, and the exit code said that all was as found": Schedule(
        PAIR, (Step("suspend", faults=(Fault(0, result="UNKNOWN"), Fault(2, result="UNKNOWN"))),)
    ),
    "one failed, another was in flight, and only the first was told": Schedule(
        PAIR, (Step("suspend", faults=(Fault(2, result="OPERATING_SYSTEM"), Fault(3, seconds=500.0)), timeout_s=0.5),)
    ),
    "a killed caller of a restore made it lost": Schedule(
        (Proc(),),
        (Step("suspend"), Step("resume", faults=(Fault(0, seconds=500.0, caller_dies_s=0.0),), events=(Event(0, "stop", 0, 0.0),))),
    ),
    "no caller came to life, and the calls that had begun were forgotten": Schedule(
        PAIR,
        (Step("suspend", faults=(Fault(3, result="NO_CALLER"),)), Step("suspend"), Step("resume", faults=(Fault(1, result="NO_CALLER"),))),
    ),
    "two records held one process": Schedule(
        (Proc(),), (Step("suspend"), Step("suspend", events=(Event(0, "born"), Event(0, "crash", after_s=0.5))), Step("recover"))
    ),
    "a suspend after a resume that was cut off left a process locked": Schedule(
        (Proc(found=LOCKED, trait="import"), Proc(gpus=(0, 1))),
        (Step("suspend"), Step("resume"), Step("suspend", events=(Event(2, "interrupt"),))),
    ),
    "somebody's allocation counted as memory that stayed": Schedule((Proc(found=LOCKED),), (Step("suspend", events=(Event(8, "take"),)),)),
    "recover kept a process locked because another found no room": Schedule(
        PAIR, (Step("suspend", events=(Event(40, "take"), Event(40, "crash")), faults=(Fault(2, result="UNKNOWN"),)),), gpu_gib=TIGHT_GIB
    ),
    "one ended while its group went back, the others were left behind, and the exit code said that all was as found": Schedule(
        (Proc(agent=True), Proc(gpus=(1,), agent=True)),
        (Step("suspend", events=(Event(42, "die"),), faults=(Fault(9, result="UNKNOWN"),)),),
    ),
    "a restore that went on without controller and caller, and the next one on its GPU": Schedule(
        (Proc(gib=6), Proc(group=1, gib=6)),
        (
            Step("suspend", (0,)),
            Step("suspend", (1,)),
            Step("resume", (0,), events=(Event(0, "kill-all", after_s=0.5),), faults=(Fault(0, seconds=500.0),)),
            Step("resume", (1,)),
        ),
        gpu_gib=TIGHT_GIB,
    ),
}


@pytest.mark.parametrize("schedule", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_examples(schedule: Schedule) -> None:
    check(schedule)


def test_one_born_while_the_others_are_locked_ends_it() -> None:
    player = Player.of(Schedule(PAIR, ()))
    played = player.play(Step("suspend", events=(Event(0, "born", after_s=0.005),)))
    assert isinstance(played.error, errors.Aborted)
    assert set(played.after.values()) == {RUNNING}
    assert not player.machine.records


def test_way_back_waits_for_room_after_one_interruption() -> None:
    """Somebody takes the room just when Ctrl-C asks for the way back, and gives it back a little later."""
    events = (Event(0, "interrupt", after_s=1.0), Event(0, "take", after_s=2.0), Event(0, "free", after_s=7.0))
    step = Step("suspend", events=events, faults=(Fault(3, seconds=3.0),))
    player = Player.of(Schedule(PAIR, (), gpu_gib=TIGHT_GIB + 1))
    played = player.play(step)
    assert player.machine.takers
    assert played.code == 130
    assert set(played.after.values()) == {RUNNING}


def test_a_plan_for_what_is_in_flight() -> None:
    player = Player.of(Schedule((Proc(),), ()))
    player.play(Step("suspend"))
    assert player.play(Step("resume", faults=(Fault(0, seconds=500.0),))).code == 3
    plan = Preview(MemoryWorld(player.machine), "resume").resume([FIRST_PID]).details["plan"]
    assert (plan["refused"]["code"], plan["steps"]) == ("in-flight", [])


def test_the_deadline_of_recover_is_that_of_all_records_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no waiting is done even when those before have taken all the time."""
    player = Player.of(Schedule(tuple(Proc(group=g) for g in range(3)), ()))
    for g in range(3):
        player.play(Step("suspend", (g,), events=(Event(18, "crash"),)))
    had, recover = [], Operation.recover

    def slowly(operation: Operation, record: Record) -> Report | None:
        had.append(operation.deadline.limit_s)
        report = recover(operation, record)
        operation.world.wait((), operation.world.now() + 20.0)
        return report

    monkeypatch.setattr(Operation, "recover", slowly)
    reports = recover_all(MemoryWorld(player.machine), timeout_s=30.0)
    assert had[0] == 30.0
    assert had[1] < 10.1
    assert had[2] < 0.1
    assert [r.ok for r in reports] == [True] * 3
    assert set(player.states().values()) <= {RUNNING, CHECKPOINTED}


@pytest.mark.parametrize("what", ["crash", "kill-all"])
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.5])
@pytest.mark.parametrize("found", [(RUNNING, RUNNING), (RUNNING, CHECKPOINTED), (LOCKED, RUNNING)])
def test_killed_at_every_point(what: str, after_s: float, found: tuple[State, State]) -> None:
    """kill -9 between any two steps of a suspend, of the resume that follows, and of a suspend that takes over from an earlier one."""
    processes = (Proc(found=found[0]), Proc(gpus=(0, 1), found=found[1]))
    suspend, again = Step("suspend", keep=True), Step("suspend", events=(Event(0, "born"),), keep=True)
    killed = 0
    for steps in ((suspend,), (suspend, Step("resume")), (suspend, again)):
        player = Player.of(Schedule(processes, ()))
        points = [player.play(step).points for step in steps][-1]
        for point in range(points):
            last = dataclasses.replace(steps[-1], events=(*steps[-1].events, Event(point, what, after_s=after_s)))
            check(Schedule(processes, (*steps[:-1], last)))
            killed += 1
    assert killed > 60


@pytest.mark.parametrize("by", ["auto", "pool"])
@pytest.mark.parametrize("after_s", [0.0, 0.005])
def test_killed_at_every_point_with_a_pool(by: str, after_s: float) -> None:
    """kill -9 between any two steps of a suspend of two ranks, one with a pool, and of the resume that follows."""
    processes = (Proc(agent=True, pool_gib=2), Proc(gpus=(1,), agent=True))
    suspend = Step("suspend", by=by)
    for steps in ((suspend,), (suspend, Step("resume"))):
        player = Player.of(Schedule(processes, ()))
        points = [player.play(step).points for step in steps][-1]
        assert points > 20
        for point in range(points):
            last = dataclasses.replace(steps[-1], events=(Event(point, "crash", after_s=after_s),))
            check(Schedule(processes, (*steps[:-1], last)))


@pytest.mark.parametrize("found", [RUNNING, CHECKPOINTED])
def test_stopped_at_every_point(found: State) -> None:
    """SIGSTOP between any two steps of a suspend to disk, and of the move there of what was suspended before."""
    step = Step("suspend", keep=True)
    points = Player.of(Schedule((Proc(found=found),), ())).play(step).points
    assert points > 15
    for point in range(points):
        check(Schedule((Proc(found=found),), (dataclasses.replace(step, events=(Event(point, "stop"),)),)))


@pytest.mark.parametrize("seen_s", [None, 0.0, 0.5])
@pytest.mark.parametrize("processes", [PAIR, (Proc(agent=True, pool_gib=2), Proc(gpus=(1,), agent=True))], ids=["driver", "agents"])
def test_nvml_fails_at_every_point(processes: tuple[Proc, ...], seen_s: float | None) -> None:
    """From then on, or for a while: in a suspend, in one that goes back, in a resume, in a recovery."""
    fails = Step("suspend", faults=(Fault(10 if processes[0].agent else 3, result="UNKNOWN"),))
    cut = Step("suspend", events=(Event(25, "crash"),))
    for steps in ((Step("suspend"),), (fails,), (Step("suspend"), Step("resume")), (cut, Step("recover"))):
        player = Player.of(Schedule(processes, ()))
        points = [player.play(step).points for step in steps][-1]
        assert points > 10
        for point in range(points):
            again = () if seen_s is None else (Event(point + (seen_s == 0), "seen", after_s=seen_s),)
            last = dataclasses.replace(steps[-1], events=(*steps[-1].events, Event(point, "blind"), *again))
            check(Schedule(processes, (*steps[:-1], last)))


def run(count: int, commands: str, longest: int, who: SearchStrategy[tuple[Proc, ...]] | None = None) -> None:
    """Check *count* random schedules. A failing one is printed with what reproduces it."""
    ran = 0

    @settings(max_examples=count, deadline=None, print_blob=True, database=None, suppress_health_check=list(HealthCheck))
    @given(schedules(commands, longest, who))
    def one(schedule: Schedule) -> None:
        nonlocal ran
        ran += 1
        check(schedule)

    one()
    print(f"{ran} schedules")
    assert ran >= count


@pytest.mark.parametrize("part", range(2))
def test_suspends(part: int) -> None:
    run(270, "suspend", 1)


@pytest.mark.parametrize("part", range(2))
def test_resumes(part: int) -> None:
    run(270, "suspend resume", 2)


@pytest.mark.parametrize("part", range(2))
def test_sequences(part: int) -> None:
    run(270, "suspend resume recover", 4)


@pytest.mark.parametrize("part", range(2))
def test_jobs_with_agents(part: int) -> None:
    run(220, "suspend resume recover", 3, ranks())


@pytest.mark.parametrize("part", range(2))
def test_jobs_with_pools(part: int) -> None:
    run(150, "suspend resume recover", 4, pools())

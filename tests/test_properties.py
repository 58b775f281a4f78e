"""Whatever goes wrong: every process ends as it was found, or suspended and restorable, or named, or dead.

The real plan, walk, operation, recovery and record types, against a machine in memory with numbered crash points
(``memory_world.py``). A failing schedule is printed whole, to be kept below as an example.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, note, settings

from gpuckpt import errors
from gpuckpt.journal import Record
from gpuckpt.model import State, Status
from gpuckpt.recovery import unfinished
from tests.memory_world import MemoryWorld, described
from tests.schedules import TIGHT_GIB, Played, Player, Schedule, Step, schedules

AS_FOUND = (1, 5, 6, 124, 130)


def check(schedule: Schedule) -> None:
    """Play *schedule*, recover as a user would, and hold the end against what is promised."""
    player = Player.of(schedule)
    machine, start = player.machine, player.states()
    named: dict[int, str] = {}
    for step in schedule.steps:
        belongs = {m.id.pid: m.found for r in machine.counting() if r.status is not Status.SUSPENDED for m in r.members}
        resuming = {m.id.pid for r in machine.counting() if r.status is Status.RESUMING for m in r.members}
        played = player.play(step)
        note(f"{step.command}: exit {played.code}, {played.error!r}, {played.after}, {[described(r) for r in machine.counting()]}")
        check_exit(played, {**belongs, **dict.fromkeys(resuming, State.RUNNING)})
        named.update(played.words)
    machine.run(float("inf"))
    recovered = player.recover()
    note(f"recover: {[r.details['recovered'] for r in recovered.reports]}, {player.states()}")
    named.update(recovered.words)
    check_locks(player, start, named)
    machine.mend()
    for _ in range(2):
        recovered = player.recover()
        note(f"recover: {[r.details['recovered'] for r in recovered.reports]}, {player.states()}")
        machine.run(float("inf"))
        named.update(recovered.words)
    check_end(player, start, named, recovered)
    check_restorable(player)
    assert not machine.wrongs, machine.wrongs
    assert not machine.claims


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
        told = {w for w in played.words.values() if w != "gone"}
        assert told <= {goal, "lost"} if played.step.command == "suspend" else told <= {goal}
        for pid, word in played.words.items():
            assert word in ("gone", "lost") or alive.get(pid, State.CHECKPOINTED if word == "suspended" else State.RUNNING) is (
                State.CHECKPOINTED if word == "suspended" else State.RUNNING
            )
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
        elif state is State.CHECKPOINTED:
            assert start.get(pid) is State.CHECKPOINTED or pid in inside, f"{pid} is suspended and no record says so"
        elif state is State.RUNNING and start.get(pid) is State.CHECKPOINTED:
            assert "resume" in player.ran, f"{pid} was resumed although nobody asked"
    for record in records:
        check_record(record, player, lost)
    world = MemoryWorld(player.machine)
    left = [r for r in unfinished(world) if not any(m.lost for m in r.members)]
    full = player.schedule.gpu_gib == TIGHT_GIB and any(r.error and r.error["step"] == "room" for r in last.reports)
    assert not left or full, [described(r) for r in left]


def check_record(record: Record, player: Player, lost: set[int]) -> None:
    states = player.states()
    alive = {m.id.pid: m for m in record.members if m.id.pid in states}
    assert alive, f"a record of the dead: {described(record)}"
    assert all(m.id.pid in lost for m in alive.values() if m.lost), f"called lost, and is not: {described(record)}"
    assert any(states[pid] is State.CHECKPOINTED for pid in alive), f"a record of a group that runs: {described(record)}"
    if record.status is Status.SUSPENDED:
        assert all(states[pid] is State.CHECKPOINTED for pid in alive), f"not suspended: {described(record)}"
    assert not record.retained, f"nothing was exported: {described(record)}"


def check_restorable(player: Player) -> None:
    """Whatever is suspended comes back when it is asked to."""
    player.machine.mend()
    doomed = player.machine.may_be_lost
    for pid in player.states():
        if player.states()[pid] is State.CHECKPOINTED:
            played = player.play(Step("resume", (pid,)))
            note(f"resume {pid}: exit {played.code}, {played.error!r}")
            full = player.schedule.gpu_gib == TIGHT_GIB and isinstance(played.error, errors.GpuMemory)
            if player.states()[pid] is not State.RUNNING and not full:
                assert pid in doomed, f"{pid} does not come back"
                assert played.code == 3
                assert played.words[pid] == "lost"
    for record in player.machine.counting():
        assert player.schedule.gpu_gib == TIGHT_GIB or any(m.id.pid in doomed for m in record.members), (
            f"all of it runs again: {described(record)}"
        )


def run(count: int, commands: str, longest: int) -> None:
    """Check *count* random schedules. A failing one is printed with what reproduces it."""
    ran = 0

    @settings(max_examples=count, deadline=None, print_blob=True, database=None, suppress_health_check=list(HealthCheck))
    @given(schedules(commands, longest))
    def one(schedule: Schedule) -> None:
        nonlocal ran
        ran += 1
        check(schedule)

    one()
    print(f"{ran} schedules")
    assert ran >= count


def test_suspends() -> None:
    run(700, "suspend", 1)


def test_resumes() -> None:
    run(700, "suspend resume", 2)


def test_sequences() -> None:
    run(700, "suspend resume recover", 4)

"""Room on the GPUs: which card a group is restored onto, and the wait until every card has room for what it gets.

A restore that runs out of memory loses the process, so nothing here guesses: unknown is not free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpuckpt import errors, plan
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Gpu, GpuBytes, Inventory, ProcessId, State, Status
from gpuckpt.walk import Walk
from gpuckpt.words import duration, let_go, size


def gpu_map_for(walk: Walk, wished: Mapping[str, str], to_gpu: str) -> dict[str, str]:
    """The driver's full map for the user's wish. Raises for GPUs that do not fit each other."""
    assert walk.record is not None
    on = sorted({g.uuid for m in walk.record.members for g in m.gpus})
    if to_gpu:
        if len(on) != 1:
            raise errors.Usage(f"the group was on {len(on)} GPUs ({', '.join(on)}): name each, --gpu OLD=NEW")
        wished = {on[0]: to_gpu}
    gpus = walk.world.gpus()
    try:
        full = plan.full_gpu_map(wished, gpus)
    except ValueError as e:
        raise errors.Usage(f"--gpu: {e}", hint="gpuckpt ps lists the GPUs") from e
    names = {g.uuid: g.name for g in (*walk.record.gpus, *gpus)}
    for old in on:
        new = full.get(old, old)
        if names.get(old) and names.get(new) != names.get(old):
            raise errors.GpuChanged(
                f"{new} is a {names.get(new)}, {old} was a {names.get(old)}: the driver restores only onto the same chip", gpu=new
            )
    if full:
        walk.world.refuse_maps()
    if full and State.CHECKPOINTED not in walk.now.values():
        raise errors.Usage("a process changes its GPU only where the driver has suspended it: these are suspended by their pool")
    return full


def refuse_running(pid: int, inventory: Inventory, wished: Mapping[str, str], to_gpu: str) -> None:
    """Raise if *pid*, whose group *inventory* runs, is wished onto a GPU on which the group is not."""
    if not {*wished.values(), to_gpu} - {""} <= {g.uuid for p in inventory.processes for g in p.gpus}:
        raise errors.Usage(
            f"pid {pid} is running: a process changes its GPU only while it is suspended",
            hint=f"gpuckpt suspend {pid}, then resume it with --gpu",
            pid=pid,
        )


def claim(walk: Walk, gpu_map: Mapping[str, str], until: float) -> None:
    """Hold the GPUs of the restore to come, and return once each has room. Raises, with nothing changed, if none comes by *until*.
    While it waits it holds none: others may need less room, or need the GPUs to go back.

    What interrupts it is a signal that comes while it waits: the way back after a Ctrl-C waits like any other.
    """
    assert walk.record is not None
    before = len(walk.world.interruptions)
    needed = need(walk, gpu_map)
    gpus = [g for g in walk.world.gpus() if g.uuid in needed]
    held = walk.world.claim_gpus(gpus, latest := max(until, walk.deadline.at))
    walk.claims.append(held)
    with walk.step("room"):
        while True:
            coming = restores_to_come(walk, needed)
            short = shortages(walk, needed, gpu_map)
            if not coming and not short:
                return
            others = not short and all(walk.world.claimed(p) for p in coming)  # at work, and will end
            if len(walk.world.interruptions) > before:
                signum = walk.world.interruptions[-1]
                raise errors.Interrupted("interrupted while waiting for room; nothing was restored", signum=signum, step="room")
            patience = latest if others else until
            if walk.world.now() >= patience or any(s.kind == "missing" for s in short):
                raise no_room(walk, short[0]) if short else still_coming(walk, coming[0])
            walk.say("room", f"waiting for {f'room on {short[0].uuid}' if short else f'what is under way on pid {coming[0]} to end'}")
            walk.claims.remove(held)
            walk.world.let_go(held)
            walk.world.wait((), min(patience, walk.world.now() + 0.2))
            held = walk.world.claim_gpus(gpus, latest)
            walk.claims.append(held)


def for_goal(walk: Walk, goal: Mapping[ProcessId, State], wait_s: float) -> tuple[dict[ProcessId, State], GpuckptError | None]:
    """*goal*, its GPUs held and with room; or how far each process goes without, and why there is none."""
    coming = [p for p, s in goal.items() if walk.needs_room(p, s)]
    if coming:
        try:
            claim(walk, {}, until=walk.world.now() + wait_s)
        except GpuckptError as e:
            return {p: _without(walk, p, s, p in coming) for p, s in goal.items()}, e
    return dict(goal), None


def _without(walk: Walk, process: ProcessId, goal: State, coming: bool) -> State:
    """How far *process* goes if there is no room for all. Communicators come back on every rank or on none, so those whose agents have
    suspended them wait disarmed; whoever has memory to bring back (*coming*) waits as it is, though not locked."""
    state = walk.now[process]
    if plan.DEPTH[goal] >= plan.DEPTH[state]:
        return goal
    if process in walk.agents and state in (State.COMMS_SUSPENDED, State.DISARMED, State.LOCKED):
        return State.DISARMED
    return state if coming else goal


def shortages(walk: Walk, needed: Mapping[str, int], gpu_map: Mapping[str, str]) -> list[plan.Shortage]:
    """Why the restore may not be called now. On the GPUs that it came from they must be as they were; moved, that means nothing."""
    assert walk.record is not None
    recorded = {} if gpu_map else {g.uuid: g for g in walk.record.gpus}
    gpus = walk.world.gpus()
    crowded = [g for g in gpus if g.uuid in needed and g.compute_mode == "exclusive-process" and len(_users(walk, g.uuid, gpu_map)) > 1]
    return plan.shortages(needed, recorded, gpus) + [plan.Shortage("crowded", g.uuid, needed[g.uuid], g.free_bytes) for g in crowded]


def _users(walk: Walk, uuid: str, gpu_map: Mapping[str, str]) -> set[int]:
    """Pids of all that are on a GPU, and of members that would come back to it."""
    assert walk.record is not None
    coming = [m for m in walk.record.members if not m.lost and walk.needs_room(m.id, State.RUNNING)]
    here = {pid for pid, on in walk.world.held().items() if uuid in on}
    return here | {m.id.pid for m in coming if not m.gpus or any(gpu_map.get(g.uuid, g.uuid) == uuid for g in m.gpus)}


def restores_to_come(walk: Walk, uuids: Collection[str]) -> list[ProcessId]:
    """Processes of other groups that may yet take memory back on these GPUs, which we hold: what they have yet to take would look free.

    Whoever is at work on one takes its GPU first. But the driver goes on with a restore when its controller and its caller are killed
    together, as by the end of a service or container, and an agent brings its process's memory back once its controller is gone.
    """
    assert walk.record is not None
    found = []
    for record in walk.world.journal.records():
        if record.id != walk.record.id and record.status is not Status.SUSPENDED:
            onto = any(u in uuids for u in record.onto)
            near = {m.id: m for m in record.members if not m.along and (onto or not m.gpus or any(g.uuid in uuids for g in m.gpus))}
            left = {p for p in near if not walk.world.claimed(p)}
            states = walk.world.states(p for p, m in near.items() if p in left or m.movable)
            found += [
                p for p, state in states.items() if (state is State.BLOCKED and p in left) or (near[p].movable and state in plan.AWAY)
            ]
    return found


def still_coming(walk: Walk, process: ProcessId) -> GpuckptError:
    stays = "nothing was restored; the suspended process is intact"
    if walk.world.claimed(process):
        words = f"a gpuckpt is at work on {walk.world.describe(process.pid)} on the same GPU, which may still take its memory back"
        return errors.Busy(f"{words}; {stays}", hint="try again when it has ended", pid=process.pid, step="room")
    halted = walk.world.halted(process)
    then = f"{let_go(halted, [process.pid])}, then " if halted else "when it has ended, "
    return errors.Busy(
        f"{walk.world.describe(process.pid)} was left in the middle on the same GPU, and may still take its memory back; {stays}",
        hint=f"{then}gpuckpt recover",
        pid=process.pid,
        step="room",
    )


def need(walk: Walk, gpu_map: Mapping[str, str]) -> dict[str, int]:
    """Free bytes that bringing back the suspended members needs on each GPU; estimated from the images where nobody recorded it."""
    assert walk.record is not None
    coming = [m for m in walk.record.members if not m.lost and walk.needs_room(m.id, State.RUNNING)]
    held: list[GpuBytes] = []
    for m in coming:
        if walk.now[m.id] is not State.CHECKPOINTED:  # the driver left it its rest
            here = walk.world.held().get(m.id.pid, {})
            held += [GpuBytes(g.uuid, max(0, (g.nbytes or 0) - (here.get(g.uuid) or 0))) for g in m.gpus]
            continue
        known = [g for g in m.gpus if g.nbytes is not None]
        if known and len(known) == len(m.gpus):
            held += known
        else:
            image = walk.world.image_bytes(m.id)
            held += [GpuBytes(g.uuid, image) for g in (m.gpus or [GpuBytes(g.uuid, None) for g in walk.world.gpus()])]
    return plan.room_need_bytes(held, walk.record.retained, gpu_map, {g.uuid: g.free_bytes for g in walk.record.gpus})


def no_room(walk: Walk, short: plan.Shortage) -> GpuckptError:
    stays = "nothing was restored; the suspended process is intact"
    gpu = next((g for g in walk.world.gpus() if g.uuid == short.uuid), Gpu(short.uuid, -1))
    if short.kind in ("lost", "missing"):
        return errors.GpuLost(
            f"{gpu.label} is {'lost' if short.kind == 'lost' else 'not on this machine any more'}; {stays}",
            hint="dmesg | grep -i xid says why; when nvidia-smi shows the card again, resume again. A reboot ends the process",
            gpu=short.uuid,
            step="room",
        )
    if short.kind == "changed":
        return errors.GpuChanged(f"{gpu.label}: {short.what}; {stays}", hint="set it back as it was", gpu=short.uuid, step="room")
    if short.kind == "unknown":
        return errors.GpuUnknown(
            f"the memory of {gpu.label} cannot be queried, and unknown is not free; {stays}",
            hint="nvidia-smi -q -d MEMORY; then resume again, or wait for it with --wait 1m",
            gpu=short.uuid,
            step="room",
        )
    holders = sorted(((n.get(short.uuid) or 0, pid) for pid, n in walk.world.held().items() if short.uuid in n), reverse=True)[:5]
    ages = {pid: age for _, pid in holders if (age := walk.world.age_s(pid)) is not None}
    named = ", ".join(
        f"{walk.world.describe(pid)}{f', started {duration(ages[pid])} ago' if pid in ages else ''}: {size(nbytes)}"
        for nbytes, pid in holders
    )
    end = f" (kill {next(iter(ages))} ends the largest holder)" if ages else ""
    longer = " and a longer --timeout" if walk.world.now() >= walk.deadline.at else ""
    why = f"has {size(short.free_bytes or 0)} free, the restore needs {size(short.needed_bytes)}"
    if short.kind == "crowded":
        why = "takes one process at a time (its compute mode is exclusive-process)" + (
            "" if named else ", and several would come back to it"
        )
    return errors.GpuMemory(
        f"{gpu.label} {why}; {stays}." + (f" Held by {named}" if named else ""),
        hint=f"free the GPU{end}, then resume again; or let it wait: --wait 10m{longer}",
        gpu=short.uuid,
        step="room",
    )

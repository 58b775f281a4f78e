"""The real world: this machine's processes, its GPUs (or simulated ones), its signals, and locks that all users share."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuckpt import along as beside
from gpuckpt import claims, early, errors, host_room, refusals
from gpuckpt.agent import told
from gpuckpt.agent.client import AgentPending, Agents, Hello
from gpuckpt.claims import FileClaim
from gpuckpt.driver.api import CallError
from gpuckpt.driver.caller import Pending
from gpuckpt.early import Start
from gpuckpt.inspect import hazards, host, processes
from gpuckpt.inspect.processes import Proc
from gpuckpt.inspect.ranks import advice
from gpuckpt.interruptible import Interruptible
from gpuckpt.journal import Journal, Record, boot_id, state_directory, void_words
from gpuckpt.model import Call, Gpu, GpuBytes, GpuProcess, Hazard, HostRoom, Inventory, ProcessId, Rank, State

#: How long the driver may take to tell a state before it counts as blocked, in seconds. It answers in 2 ms.
STATE_DEADLINE_S = 2.0
_POLL_S = 0.05


class LocalWorld(Interruptible):
    """Implements :class:`gpuckpt.world.World` on this machine. Use as a context manager around one *command*, which hints name.

    *start*: what a command line has begun before it imported this.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, *, command: str = "suspend", start: Start | None = None) -> None:
        self.command = command
        directory = environ.get("GPUCKPT_SIMULATE", "")
        self.simulated = bool(directory)
        start = start or early.begin(environ)
        self.callers, self.devices = start.callers, start.devices
        super().__init__()
        self.devices.signals = self.interruptions
        self.agents = Agents()
        self._said: dict[ProcessId, Hello | None] = {}  # by the agents that have been asked: once an inspection
        self._loaded: set[ProcessId] = set()  # those that were seen with the driver's library
        self.journal = Journal(state_directory(environ, os.geteuid()), boot_id())
        me = processes.read(os.getpid())
        self.me = me.id if me else ProcessId(os.getpid(), 0)
        self.user = f"{processes.user_name(os.geteuid())} (uid {os.geteuid()})"
        self.root = Path(directory) / "root" if directory and (Path(directory) / "root").is_dir() else Path("/")

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.callers.close()
        self.devices.close()
        self.agents.close()
        super().close()

    # Looking.

    def now(self) -> float:
        return time.monotonic()

    def inspect(
        self, targets: Sequence[int], *, tree: bool, along: Collection[int] = (), method: str = "auto", look_s: float = 0.0
    ) -> Inventory:
        procs = processes.table()  # first: NVML may still be on its way
        refusals.check_driver(self.devices.version())
        self._said.clear()
        gpus = self.devices.gpus()
        held = self.devices.processes()
        void = self.void()
        for target in (*targets, *along):
            refusals.check_target(target, self.me.pid, self.command, procs, void)
        beside.refuse_named_twice(targets, along)
        members, related = self._group(targets, procs, held, tree, without=along)
        if not members:
            refusals.explain_nothing(targets, self.command)
        others = self._group(sorted(along), procs, held, tree)[0] if along else {}
        taken = {pid: p._replace(along=True) for pid, p in others.items() if pid not in members}
        members |= taken
        if 1 in members:
            refusals.explain_init(targets)
        for p in members.values():
            uid = processes.uid_of(p.pid)
            if os.geteuid() not in (0, uid):
                raise errors.PermissionDenied(
                    f"pid {p.pid} ({p.name}) belongs to {processes.user_name(uid)}; nothing was touched",
                    hint=f"sudo gpuckpt {self.command} {p.pid}",
                    pid=p.pid,
                )
        near = {pid for others in related.values() for pid in others}
        able = [procs[pid].id for pid in {*members, *near} if pid in procs and not self.halted(procs[pid].id)]  # others keep us waiting
        self._said |= self.agents.hellos(p for p in able if p not in self._said)
        self._said |= self.agents.looks({p: said for p in able if (said := self._said.get(p))}, look_s, lambda: bool(self.interruptions))
        hellos = {p.pid: hello for p in able if (hello := self._said.get(p))}
        blind = {pid for pid in members if pid in hellos and hellos[pid].blind}
        vouched = {pid for pid, hello in hellos.items() if not hello.hazards}
        members = {pid: told.of(p, hellos.get(pid)) for pid, p in members.items()}
        silent = {p.pid for p in self.agents.silent}
        beside.refuse({pid: p for pid, p in members.items() if p.along}, along, silent)
        found = [hazards.silent(p) for p in members.values() if p.pid in silent]
        for p in members.values():
            own = hazards.of_process(p, procs[p.pid], self.root, communicators=told.own_ranks(hellos.get(p.pid)))
            own = [h for h in own if not (p.pid in blind and h.kind == "nccl-communicator")]  # it looks itself, when it stands
            found += [h for h in own if not p.along or h.kind == "stopped"]  # it is not checkpointed
        found += [hazards.unvouched(members[pid], words) for pid in members if pid in hellos for words in hellos[pid].hazards]
        unvouched = {pid: {o: how for o, how in others.items() if not {pid, o} <= vouched} for pid, others in related.items()}
        going = {pid: p for pid, p in members.items() if not p.along}
        found += hazards.possible_imports(going, unvouched, agents=set(hellos))
        found += hazards.of_gpus(gpus, {g.uuid for p in going.values() for g in p.gpus})
        if not self.simulated:
            found += hazards.mps(procs.values())
        needed, room, short = self.host_room(list(members.values()), method)
        ranks = () if blind else told.ranks({pid: hello for pid, hello in hellos.items() if pid in members})
        warnings = (*map(void_words, void), *self.journal.unreadable(), *told.unseen(hellos, members), *advice(ranks))
        outside = beside.outsiders(
            ranks, self.agents, lambda: [procs[p] for p in self.devices.loaded(list(procs)) if p != self.me.pid], near, self.describe
        )
        return Inventory(tuple(members[pid] for pid in sorted(members)), gpus, (*found, *short), warnings, needed, room, ranks, outside)

    def host_room(self, members: Sequence[GpuProcess], method: str) -> tuple[int, HostRoom | None, list[Hazard]]:
        """As in :func:`gpuckpt.host_room.for_images`."""
        return host_room.for_images(members, method, self.root, self.devices.gpus)

    def void(self) -> list[Record]:
        """The records of earlier boots, each once; image files that they name are removed."""
        found = self.journal.void()
        if found:
            from gpuckpt import keeping  # a status has no other use for it

            keeping.sweep((), found)
        return found

    def _group(
        self,
        targets: Sequence[int],
        procs: dict[int, Proc],
        held: dict[int, dict[str, int | None]],
        tree: bool,
        without: Collection[int] = (),
    ) -> tuple[dict[int, GpuProcess], dict[int, dict[int, str]]]:
        """Members by pid, *without* some, and how each is related to other CUDA processes."""
        mine = {self.me.pid, *processes.ancestors(self.me.pid, procs)}
        members: dict[int, GpuProcess] = {}
        related: dict[int, dict[int, str]] = {}
        frontier, seen = list(targets), set[int]()
        cuda: dict[int, GpuProcess] = {}
        asked = set[int]()  # each is looked at once: relatives have the same relatives
        while frontier:
            pid = frontier.pop()
            if pid in seen:
                continue
            seen.add(pid)
            near = processes.relatives(pid, procs, self.root)
            cuda |= self.cuda_processes({pid, *near} - asked, procs, held)
            asked |= {pid, *near}
            if pid in cuda:
                members[pid] = cuda[pid]
            others = {p: how for p, how in near.items() if p in cuda}
            if pid in cuda:
                related[pid] = others
            if tree:
                frontier += [p for p in others if p not in mine and p not in without]
        return members, related

    def cuda_processes(self, pids: Iterable[int], procs: dict[int, Proc], held: dict[int, dict[str, int | None]]) -> dict[int, GpuProcess]:
        """Those of *pids* that hold a CUDA context or are checkpointed, as the driver and NVML describe them."""
        if not (wanted := [p for p in pids if p in procs and not self._ours(procs[p])]):
            return {}
        # What /proc does not show of a process is not known to be nothing.
        headless = {p for p in wanted if procs[p].headless}
        listed = {p for p in wanted if p in held} if host.pid_namespace_is_host(self.root) else set()
        known = {p for p in wanted if procs[p].id in self._loaded}  # nobody lets go of it, and its mappings are thousands
        loaded = self.devices.loaded([p for p in wanted if p not in known]) | known | headless | listed
        self._loaded |= {procs[p].id for p in loaded}
        states = self.states(procs[p].id for p in loaded)
        # After the states: a call that ended while these were asked for has moved memory.
        unclear = [p.pid for p, state in states.items() if state in (State.RUNNING, State.DENIED, State.BLOCKED)]
        contexts, held = (self.devices.contexts(unclear) if unclear else set()) | headless, self.devices.processes()
        journalled = {m.id for r in self.journal.records() for m in r.members}
        found = {}
        for id_, state in states.items():
            pid = id_.pid
            if state in (State.NONE, State.GONE) or (state in (State.RUNNING, State.DENIED) and pid not in contexts):
                continue
            if state is State.BLOCKED and pid not in contexts and id_ not in journalled:
                continue
            gpus = tuple(GpuBytes(u, n) for u, n in sorted(held.get(pid, {}).items()))
            found[pid] = GpuProcess(
                id_,
                processes.command(pid),
                processes.uid_of(pid),
                state,
                gpus,
                self.image_bytes(id_) if state is State.CHECKPOINTED else 0,
                procs[pid].stopped,
            )
        return found

    def _ours(self, proc: Proc) -> bool:
        """Whether it is this process, or one that asks the driver on its behalf: that has the driver loaded, and nothing on a GPU."""
        helper = self.callers.helper()
        return proc.pid in (self.me.pid, helper, self.devices.helper()) or (helper != 0 and proc.ppid == helper)

    def states(self, processes_: Iterable[ProcessId]) -> dict[ProcessId, State]:
        found: dict[ProcessId, State] = {}
        pending = []
        for process in processes_:
            proc = processes.read(process.pid)
            if proc is None or proc.start_ticks != process.start_ticks:
                found[process] = State.GONE
            elif processes.halted(process, self.root):
                found[process] = State.BLOCKED  # the driver would not answer
            else:
                try:
                    pending.append(self.callers.start(None, process))
                except CallError:
                    found[process] = State.BLOCKED  # no process could be started to ask
        until = time.monotonic() + STATE_DEADLINE_S
        while (waiting := [p for p in pending if p.outcome is None]) and time.monotonic() < until:
            self.callers.wait(waiting, until)
        for p in pending:
            found[p.process] = self._state(p)
            p.release()
        running = [p for p, state in found.items() if state is State.RUNNING]
        hellos = self.agents.hellos(running)
        self._said |= {p: hellos.get(p) for p in running}
        return found | {p: hello.stage for p, hello in hellos.items()}

    @staticmethod
    def _state(pending: Pending) -> State:
        outcome = pending.outcome
        if outcome is None or outcome.result == "VANISHED":
            return State.BLOCKED
        if outcome.result.startswith("gpuckpt:"):
            cls = errors.by_code().get(outcome.result[8:], errors.GpuckptError)
            raise cls(outcome.message, hint="gpuckpt doctor")
        return outcome.state or State.UNKNOWN

    def ranks(self, processes_: Iterable[ProcessId]) -> tuple[Rank, ...]:
        hellos = self.agents.hellos(p for p in processes_ if processes.is_same(p) and not self.halted(p))
        return told.ranks({p.pid: hello for p, hello in hellos.items()})

    def short_for_comms(self, processes_: Iterable[ProcessId]) -> list[Hazard]:
        hellos = self.agents.hellos(p for p in processes_ if processes.is_same(p) and not self.halted(p))
        return host_room.for_comms({p.pid: told.comms_bytes(hello) for p, hello in hellos.items()}, self.root)

    def silent(self, process: ProcessId) -> bool:
        return self._said.get(process) is None

    def halted(self, process: ProcessId) -> str:
        return processes.halted(process, self.root)

    def alive(self, process: ProcessId) -> bool:
        return processes.is_same(process)

    def gpus(self) -> tuple[Gpu, ...]:
        return self.devices.gpus()

    def refuse_maps(self) -> None:
        refusals.check_maps(self.devices.version())

    def held(self) -> dict[int, dict[str, int | None]]:
        return self.devices.processes()

    def image_bytes(self, process: ProcessId) -> int:
        """Size of its image: what it held on its GPUs where the journal knows that (the image is 10 MiB larger), else estimated from
        its mappings, for which the kernel walks every page: 10 ms a GiB."""
        member = next((m for r in self.journal.records() if (m := r.member(process))), None)
        if member and member.gpus and all(g.nbytes is not None for g in member.gpus):
            return max(0, sum(g.nbytes or 0 for g in member.gpus) - sum((member.moved or {}).values()))
        if member and member.image and "nbytes" in member.image:
            return int(member.image["nbytes"])  # it may be on disk, and its mapping empty
        if not processes.is_same(process):
            return 0
        return max(self.devices.image_bytes(process.pid), int(self.image(process).get("bytes", 0)))

    def image(self, process: ProcessId) -> Mapping[str, Any]:
        return self.devices.image(process) if processes.is_same(process) else {}

    def describe(self, pid: int) -> str:
        uid, run = processes.uid_of(pid), processes.run_of(pid)
        of_run = f", run {run}" if run else ""
        return f"pid {pid} ({processes.command(pid)}, {processes.user_name(uid)}{of_run})" if uid >= 0 else f"pid {pid}"

    def age_s(self, pid: int) -> float | None:
        proc = processes.read(pid)
        return None if proc is None else self.uptime_s() - _born_s(proc.id)

    def uptime_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def heir(self, process: ProcessId) -> tuple[ProcessId, float] | None:
        proc = processes.read(process.pid)
        return None if proc is None or proc.id == process else (proc.id, _born_s(proc.id))

    # Acting.

    def start(
        self,
        call: Call,
        process: ProcessId,
        *,
        timeout_s: float = 0.0,
        gpu_map: Mapping[str, str] | None = None,
        initialise: bool = False,
        image: Mapping[str, Any] | None = None,
        claims: Sequence[FileClaim] = (),
    ) -> Pending:
        fds = [fd for claim in claims for fd in claim.fds]
        return self.callers.start(call, process, timeout_s=timeout_s, gpu_map=gpu_map, initialise=initialise, image=image, claims=fds)

    def ask(
        self,
        call: Call,
        processes_: Sequence[ProcessId],
        *,
        operation: str,
        timeout_s: float,
        movable: Collection[ProcessId] = (),
        keep: bool = False,
        accept: bool = False,
        measure: bool = False,
    ) -> dict[ProcessId, AgentPending]:
        return self.agents.start(call, processes_, operation, timeout_s, movable, keep, accept, measure)

    def wait(self, pending: Collection[Any], until: float) -> None:
        if any(p.call is Call.CHECKPOINT for p in pending):
            from gpuckpt.image import preload  # noqa: F401 - the report will need it, and now is time
        self.callers.wait(pending, until, self.waker)
        self.heard()

    def claim(self, processes_: Sequence[ProcessId], until: float) -> FileClaim:
        return self._claim({f"/proc/{p.pid}": f"pid {p.pid}" for p in sorted(processes_) if processes.is_same(p)}, until)

    def claimed(self, process: ProcessId) -> bool:
        return claims.taken(f"/proc/{process.pid}")

    def let_go(self, claim: FileClaim) -> None:
        claim.release()

    def claim_gpus(self, gpus: Sequence[Gpu], until: float) -> FileClaim:
        return self._claim({self.devices.gpu_lock_path(g): g.label for g in sorted(gpus, key=lambda g: g.uuid)}, until)

    def _claim(self, names: Mapping[str, str], until: float) -> FileClaim:
        before = len(self.interruptions)
        return claims.take(names, lambda fd, name: self._wait_for(fd, name, until, before))

    def _wait_for(self, fd: int, name: str, until: float, signals: int) -> None:
        if len(self.interruptions) > signals:
            raise errors.Interrupted("interrupted while waiting for another gpuckpt; nothing was touched", signum=self.interruptions[-1])
        if self.now() >= until:
            raise claims.busy(fd, name, self.describe)
        self.wait((), min(until, self.now() + _POLL_S))


def _born_s(process: ProcessId) -> float:
    """Seconds since boot."""
    return process.start_ticks / os.sysconf("SC_CLK_TCK")

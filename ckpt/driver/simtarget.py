"""A program with simulated CUDA state, driven by lines on its standard input: what tests and the demo suspend.

``python -m gpuckpt.driver.simtarget`` registers in the directory ``$GPUCKPT_SIMULATE``, prints ``{"ready": true, "pid": …, "sum": …}``
and answers each command by one line of JSON:

``check``          the ``sum`` over its GPU content; like every CUDA call it waits until the process is running
``step``           changes the content, the same way each time, and gives the new ``sum``
``busy SECONDS``   queues kernels that take so long, and answers at once
``alloc GIB``      allocates more on its first GPU
``sleep [TAG]``, ``wake``  its own call to its pool (``--pool``)
``children COMMAND``  passes a command on to its ``--spawn`` children and collects their answers
``quit``           ends it, as the end of its input does without ``--daemon``

It exits with 70 when a command finds its GPU state lost.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from gpuckpt.driver.api import CallError
from gpuckpt.driver.simulated_rules import TRAITS
from gpuckpt.driver.simulated_store import SimulatedWorldDir
from gpuckpt.driver.simulated_world import StateLostError

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from gpuckpt.driver.simulated_pool import SimulatedPool

GIB = 1 << 30
EXIT_LOST = 70


class Target:
    """This process as the holder of GPU memory."""

    def __init__(self, world: SimulatedWorldDir, children: list[subprocess.Popen[str]], pool: SimulatedPool | None = None) -> None:
        self.world, self.pool = world, pool
        self.pid = os.getpid()
        self.children = children

    def answer(self, command: str, argument: str) -> dict[str, Any]:
        match command:
            case "check":
                return self.check()
            case "step":
                return self.step()
            case "busy":
                self.world.make_busy(self.pid, float(argument))
                return {"busy_s": float(argument)}
            case "alloc":
                return self.alloc(round(float(argument) * GIB))
            case "sleep" | "wake" if self.pool is not None:
                if command == "sleep":
                    self.pool.sleep(offload=argument.split() or [s.tag for s in self.pool.stats()])
                else:
                    self.pool.wake()
                return {"asleep": sorted(self.pool.asleep())}
            case "children":
                return {"children": [_ask(child, argument) for child in self.children]}
            case _:
                return {"error": f"unknown command: {command}"}

    def check(self) -> dict[str, Any]:
        with self.world.cuda_call(self.pid) as contents:
            return {"sum": _sum(contents, self.pool.content if self.pool else b"")}

    def step(self) -> dict[str, Any]:
        with self.world.cuda_call(self.pid) as contents:
            for path in contents:
                old = path.read_bytes()
                path.write_bytes(hashlib.shake_256(old).digest(len(old)))
            return {"sum": _sum(contents, self.pool.content if self.pool else b"")}

    def alloc(self, nbytes: int) -> dict[str, Any]:
        with self.world.cuda_call(self.pid), self.world.transaction() as world:
            try:
                world.rules.alloc(self.pid, nbytes)
            except CallError as error:
                return {"error": error.result}
            return {"bytes": sum(world.rules.processes[self.pid].held_bytes.values())}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    world = SimulatedWorldDir(os.environ["GPUCKPT_SIMULATE"])
    forked, _keep_open = _fork(options.fork)
    children = [_spawn(options) for _ in range(options.spawn)]
    uuids = {gpu.index: uuid for uuid, gpu in world.peek().rules.gpus.items()}
    held = {uuids[index]: round(options.gib * GIB) for index in options.gpu or [0]}
    tags = {tag: round(float(gib) * GIB) for tag, _, gib in (word.partition("=") for word in options.pool)}
    told = {what: round(float(gib) * GIB) for what, _, gib in (word.partition("=") for word in options.stays)}
    held[next(iter(held))] += sum(tags.values()) + sum(told.values())
    try:
        world.register(os.getpid(), held, options.trait, round(options.exported_gib * GIB))
    except CallError as error:
        print(f"simtarget: {error}", file=sys.stderr)
        return 1
    target = Target(world, children, _install_pool(world, tags) if tags else None)
    if options.nccl_socket:
        _keep_socket = _nccl_socket(int(options.agent[0][1]) if options.agent else 0)
    has_agent = options.agent is not None or bool(tags)
    if has_agent:
        _install_agent(world, options)
        _tell(told)
    try:
        if options.busy_s:
            world.make_busy(target.pid, options.busy_s)
        _print({"ready": True, "pid": target.pid, **target.check(), "forked": forked, "children": [c.pid for c in children]})
        while line := _next_line(has_agent):
            command, _, argument = line.strip().partition(" ")
            if command == "quit":
                return 0
            _print(target.answer(command, argument))
        while options.daemon:
            signal.pause()
    except StateLostError as error:
        print(f"simtarget: {error}", file=sys.stderr)
        return EXIT_LOST
    finally:
        world.unregister(target.pid)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simtarget", description="A process with simulated CUDA state.")
    parser.add_argument("--gpu", type=int, action="append", metavar="INDEX", help="repeatable; default 0")
    parser.add_argument("--gib", type=float, default=1.0, help="to hold on each GPU")
    parser.add_argument("--trait", action="append", default=[], choices=sorted(TRAITS))
    parser.add_argument("--exported-gib", type=float, default=0.0, help="of the first GPU's, with the exported descriptor held open")
    parser.add_argument("--busy-s", type=float, default=0.0)
    parser.add_argument("--fork", type=int, default=0, metavar="N", help="children without CUDA state")
    parser.add_argument("--spawn", type=int, default=0, metavar="N", help="children with CUDA state of their own, like this one's")
    parser.add_argument("--nccl-socket", action="store_true", help="show the socket that a communicator shows")
    words = ("COMMUNICATOR", "RANK", "SIZE")
    parser.add_argument("--agent", nargs=3, action="append", metavar=words, help="install an agent that suspends it; repeatable")
    parser.add_argument("--pool", action="append", default=[], metavar="TAG=GIB", help="more, in a pool that it can empty; has an agent")
    parser.add_argument("--stays", action="append", default=[], metavar="CLASS=GIB", help="more, of which its agent can tell the class")
    parser.add_argument("--meet-in", metavar="DIRECTORY", help="where the communicator's ranks meet; by default those of this machine")
    parser.add_argument("--nccl", default="2.30.7", metavar="VERSION", help="that the agent reports")
    parser.add_argument("--backup-gib", type=float, default=0.0, help="of host memory that a suspend of each communicator takes")
    parser.add_argument("--daemon", action="store_true", help="stay when the input ends")
    return parser.parse_args(arguments)


def _next_line(agent: bool) -> str:
    """The next command; a program with an agent comes to its safe point while it waits."""
    if agent:
        import select

        from gpuckpt.agent import checkpoint_here

        while not select.select([sys.stdin], [], [], 0.01)[0]:
            checkpoint_here()
    return sys.stdin.readline()


def _install_agent(world: SimulatedWorldDir, options: argparse.Namespace) -> None:
    from gpuckpt.agent import install
    from gpuckpt.driver.simulated_comms import NoCommunicator, SimulatedCommunicator, SimulatedCommunicators

    if options.agent is None:
        install(NoCommunicator(world, os.getpid()))
        return
    more = {"nccl": options.nccl, "meet_in": options.meet_in, "backup_bytes": round(options.backup_gib * GIB)}
    made = [SimulatedCommunicator(world, os.getpid(), name, int(rank), int(size), **more) for name, rank, size in options.agent]
    install(SimulatedCommunicators(made) if len(made) > 1 else made[0])


def _install_pool(world: SimulatedWorldDir, tags: dict[str, int]) -> SimulatedPool:
    from gpuckpt.driver.simulated_pool import SimulatedPool

    pool: Any = SimulatedPool(world, os.getpid(), tags)
    sys.modules["gpuckpt.pool"] = pool
    return pool  # type: ignore[no-any-return]


def _tell(nbytes: dict[str, int]) -> None:
    """In place of what an agent asks the driver of the process that it is in."""
    from gpuckpt.agent import stays

    stays.of_driver = lambda: nbytes  # type: ignore[assignment, misc]


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _sum(contents: list[Path], more: bytes = b"") -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in contents) + more).hexdigest()


def _fork(count: int) -> tuple[list[int], int]:
    """Children that idle for as long as this process holds the descriptor returned: even SIGKILL ends them with it."""
    reader, writer = os.pipe()
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        pids.append(pid)
    os.close(reader)
    return pids, writer


def _spawn(options: argparse.Namespace) -> subprocess.Popen[str]:
    """A child like this one, once it is ready. It ends with its input, that is with this process."""
    import subprocess

    command = [sys.executable, "-m", "gpuckpt.driver.simtarget", f"--gib={options.gib}", f"--busy-s={options.busy_s}"]
    command += [f"--gpu={index}" for index in options.gpu or [0]] + [f"--trait={trait}" for trait in options.trait]
    command += [f"--exported-gib={options.exported_gib}"] + ["--nccl-socket"] * options.nccl_socket
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert child.stdout is not None
    if not child.stdout.readline():
        raise SystemExit(1)
    return child


def _ask(child: subprocess.Popen[str], command: str) -> dict[str, Any]:
    if child.stdin is None or child.stdout is None:
        raise ValueError("a child without pipes")
    try:
        child.stdin.write(command + "\n")
        line = child.stdout.readline()
    except BrokenPipeError:
        line = ""
    answer: dict[str, Any] = json.loads(line) if line else {"error": f"exited with {child.wait()}"}
    return {"pid": child.pid, **answer}


def _nccl_socket(rank: int) -> object:
    import socket

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0tmp/nccl-socket-{rank}-{os.urandom(8).hex()}")
    listener.listen()
    return listener


if __name__ == "__main__":
    sys.exit(main())

"""The `gpuckpt` program without the time that an interpreter takes to start: a process that has imported it forks itself for each command.

A test starts hundreds of commands. Each of these is a process of its own, with the arguments, environment, directory and descriptors
that it was given, and runs ``main`` from its first line; only what it would import is there already. Its name and environment in the
process table are this file's. What is about the start itself (imports, signals before it) is tested with ``subprocess``.

So it is with simtargets, but that they have their own command line in the process table.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from typing import Any

_MESSAGE_BYTES = 1 << 17
_LONGEST = 1 << 12  # command line of a simtarget


class Popen(subprocess.Popen[Any]):
    """As ``subprocess.Popen([COMMAND, *arguments])``, for the arguments that it takes here."""

    _status: socket.socket

    def _execute_child(self, args: Any, *options: Any) -> None:  # type: ignore[override]
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes = options
        assert (preexec_fn, bool(pass_fds), shell) == (None, False, False)
        new_session = pipes[11]
        standard = [fd if fd != -1 else own for fd, own in zip((pipes[0], pipes[3], pipes[5]), (0, 1, 2), strict=True)]
        order = {
            "arguments": [os.fspath(a) for a in args],
            "cwd": os.fspath(cwd or "."),
            "env": dict(os.environ if env is None else env),
            "session": new_session,
        }
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(
                _zygote("run" if order["arguments"][1:2] == ["run"] else "commands"),
                [json.dumps(order).encode()],
                [*standard, theirs.fileno()],
            )
        self.pid = int(self._status.recv(64))
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            return self.pid, int(self._status.recv(64, socket.MSG_DONTWAIT if wait_flags else 0))
        except BlockingIOError:
            return 0, 0

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _handle_exitstatus(self, status: int) -> None:
        super()._handle_exitstatus(status)  # type: ignore[misc]
        self._status.close()


def run(args: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run(args, capture_output=True, text=True)``."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=60)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def start_simtargets(commands: list[list[str]], fds: list[int], environ: dict[str, str]) -> None:
    """Simtargets with the options *commands*, in one session and without a common ancestor; *fds*: stdin and stdout of each."""
    status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with status, theirs:
        order = {"simtargets": commands, "env": environ}
        socket.send_fds(_zygote("simtargets"), [json.dumps(order).encode()], [*fds, theirs.fileno()])
        status.recv(64)
        assert int(status.recv(64)) == 0


@functools.cache
def _zygote(kind: str) -> socket.socket:
    """Started at the first order of its *kind*, and gone when its socket is: with this process. ``gpuckpt run`` has its own, since it has
    much more to fork."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = [sys.executable, __file__, str(theirs.fileno()), kind, "-" * _LONGEST]
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(_end, ours, process)
    return ours


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()  # a forked test may have the other end of it, too
    process.wait()


# The other side.


def serve(control: socket.socket, kind: str) -> None:
    """Fork for each order, and tell how each child ended, until nobody can order any more."""
    _import(kind)
    gc.freeze()  # what is there is shared with every child
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    pid, status = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    with contextlib.suppress(OSError), status:
                        status.send(str(os.waitpid(pid, 0)[1]).encode())
                    continue
                data, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 64)
                if not data:
                    os._exit(0)
                *given, told = fds
                status, order = socket.socket(fileno=told), json.loads(data)
                pid = os.fork()
                if pid == 0:
                    (_be_simtargets if "simtargets" in order else _become)(order, given)
                for fd in given:
                    os.close(fd)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
                with contextlib.suppress(OSError):
                    status.send(str(pid).encode())


def _import(kind: str) -> None:
    if kind == "simtargets":
        modules = ["agent.server", "driver.simtarget", "driver.simulated_comms"]
    else:
        from gpuckpt.cli import main

        modules = [f"cli.{module}" for module, _ in main.COMMANDS.values()]
        modules += ["driver.simulated", "image.preload", "local", "operation", *(["supervisor.supervise"] if kind == "run" else [])]
    for module in modules:
        importlib.import_module(f"gpuckpt.{module}")


def _become(order: dict[str, Any], fds: list[int]) -> None:
    """Be the program."""
    code = 1
    try:
        _take(fds, order["env"])
        if order["session"]:
            os.setsid()
        os.chdir(order["cwd"])
        sys.argv = order["arguments"]
        from gpuckpt.cli.main import main

        main()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _be_simtargets(order: dict[str, Any], fds: list[int]) -> None:
    """Be a shell that starts them in the background, and ends."""
    os.setsid()
    for n, options in enumerate(order["simtargets"]):
        if os.fork() == 0:
            from gpuckpt.driver.simtarget import main

            for signum in (signal.SIGINT, signal.SIGQUIT):
                signal.signal(signum, signal.SIG_IGN)
            _take(fds[2 * n : 2 * n + 2], order["env"])
            _say([sys.executable, "-m", "gpuckpt.driver.simtarget", *options])
            sys.exit(main(options))
    os._exit(0)


def _take(fds: list[int], environ: dict[str, str]) -> None:
    """Have *fds* for stdin and what follows it, nothing else open, and this environment."""
    for fd, standard in zip(fds, (0, 1, 2), strict=False):
        os.dup2(fd, standard)
    os.closerange(3, 1 << 12)
    os.environ.clear()
    os.environ.update(environ)
    for name, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = open(fd, "r" if fd == 0 else "w", closefd=False, errors="backslashreplace" if fd == 2 else None)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _say(words: list[str]) -> None:
    """Have these in the process table, in place of our own, which are longer."""
    with open("/proc/self/stat", "rb") as file:
        begin, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(b"\0".join(map(os.fsencode, words)).ljust(end - begin, b"\0"))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])

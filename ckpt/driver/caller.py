"""Driver calls in processes of their own: one that hangs costs a deadline and nothing else.

``Callers`` starts one warm helper that has the bindings loaded and never initialises CUDA: a fork of this process while it has one
thread (as the command line has), else a program of its own (``python -m gpuckpt.driver.caller``). The helper forks a *caller*
for each call; the call's result comes back over a socket of its own.

What the driver does (measured, benchmarks/results/driver-facts.json): a call whose caller is killed goes on in the target, to its end.
So a caller is never killed to stop a call. It is *released* instead: a released lock unlocks itself when it is granted,
and a lock that is granted after its controller died does so too. Until they end, callers hold the claims of their operation.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpuckpt.driver import forked
from gpuckpt.driver.api import CallError, Driver
from gpuckpt.model import IMAGE_CALLS, Call, Outcome, ProcessId, State

_MESSAGE_BYTES = 1 << 16
#: How long a caller may take to come to life, in seconds. It takes 5 ms; a helper that was stopped takes for ever.
HELLO_TIMEOUT_S = 10.0


@dataclass(eq=False, slots=True)
class Pending:
    """A call under way. ``outcome`` is set once it has ended."""

    call: Call | None  # None: a state query
    process: ProcessId
    caller_pid: int
    sock: socket.socket
    outcome: Outcome | None = None

    def receive(self) -> None:
        """Take in how it ended; called when its socket has something to say."""
        _receive(self)

    def keep(self) -> None:
        """The lock was granted and is wanted: its caller, which has stood by to undo it, may go."""
        with contextlib.suppress(OSError):
            self.sock.send(b"keep")
        self.sock.close()

    def release(self) -> None:
        """Leave the call to itself: a lock undoes itself when granted, anything else runs to its end."""
        self.sock.close()


@dataclass(slots=True)
class Callers:
    """Starts driver calls and waits for them. ``backend`` is "cuda" or "simulated:DIRECTORY"."""

    backend: str
    _helper_pid: int = 0
    _control: socket.socket | None = None

    def helper(self) -> int:
        """Its pid; 0 before there is one."""
        return self._helper_pid

    def warm(self) -> None:
        """Start the helper, if it is not there. Returns at once; it loads while the operation looks around."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            serves = partial(serve, theirs, self.backend)
            self._helper_pid = forked.start("gpuckpt-callers", theirs, serves) if forked.possible() else self._spawn(theirs)
        self._control = ours

    def _spawn(self, control: socket.socket) -> int:
        command = [sys.executable, "-m", "gpuckpt.driver.caller", self.backend]
        environ = {**os.environ, "GPUCKPT_CALLER_FD": str(control.fileno())}
        os.set_inheritable(control.fileno(), True)
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        return os.posix_spawn(sys.executable, command, environ, file_actions=null, setsid=True)

    def start(
        self,
        call: Call | None,
        process: ProcessId,
        *,
        timeout_s: float = 0.0,
        gpu_map: Mapping[str, str] | None = None,
        initialise: bool = False,
        image: Mapping[str, Any] | None = None,
        claims: Sequence[int] = (),
    ) -> Pending:
        """Begin *call* (None: ask for the state) on *process* in a caller of its own, which holds the *claims* (fds) until it ends."""
        request = json.dumps(
            {
                "call": call,
                "pid": process.pid,
                "start_ticks": process.start_ticks,
                "timeout_s": timeout_s,
                "gpu_map": dict(gpu_map or {}),
                "initialise": initialise,
                "image": dict(image or {}),
            }
        ).encode()
        for _ in range(2):
            self.warm()
            assert self._control is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    socket.send_fds(self._control, [request], [theirs.fileno(), *claims])
                ours.settimeout(HELLO_TIMEOUT_S)
                hello = ours.recv(_MESSAGE_BYTES)
            except OSError:
                hello = b""
            if hello:
                ours.settimeout(None)
                return Pending(call, process, int(hello), ours)
            ours.close()  # no caller came to life, and one that does later finds nobody to greet: nothing is called
            self.close()
        raise CallError(str(call or "state"), "NO_CALLER")

    def wait(self, pending: Collection[Pending], until: float, wake: socket.socket | None = None) -> None:
        """Return when at least one of *pending* has ended, at monotonic time *until*, or when *wake* becomes readable."""
        with selectors.DefaultSelector() as selector:
            for p in pending:
                if p.outcome is None:
                    selector.register(p.sock, selectors.EVENT_READ, p)
            if wake is not None:
                selector.register(wake, selectors.EVENT_READ, None)
            for key, _ in selector.select(max(0.0, until - time.monotonic())):
                if key.data is not None:
                    key.data.receive()

    def close(self) -> None:
        """Let the helper go. It stays until its callers have ended, which may be after we have."""
        if self._control is None:
            return
        self._control.close()
        self._control = None
        forked.reap(self._helper_pid)


def _receive(pending: Pending) -> None:
    try:
        data = pending.sock.recv(_MESSAGE_BYTES)
    except OSError:
        data = b""
    if data:
        answer = json.loads(data)
        state = State(answer["state"]) if answer.get("state") else None
        message, failed_in, hint = (answer.get(key, "") for key in ("message", "failed_in", "hint"))
        pending.outcome = Outcome(answer["result"], answer["seconds"], state, message, failed_in, hint, answer.get("image"))
    else:
        pending.outcome = Outcome("VANISHED")
    if not (pending.call is Call.LOCK and pending.outcome.ok):
        pending.release()  # only the caller of a granted lock waits for another word


# The helper and its callers: the other side of the sockets.


def driver(backend: str) -> Driver:
    """The adapter that *backend* names."""
    if backend.startswith("simulated:"):
        from gpuckpt.driver.simulated import SimulatedDriver

        return SimulatedDriver(backend.partition(":")[2])
    from gpuckpt.driver.cuda import CudaDriver

    return CudaDriver()


def serve(control: socket.socket, name: str) -> None:
    """Be the helper for backend *name*: serve requests until the controller is gone, then wait for the callers that still run."""
    from gpuckpt.errors import GpuckptError

    problem: GpuckptError | None = None
    backend: Driver | None = None
    try:
        backend = driver(name)
    except GpuckptError as e:
        problem = e
    from gpuckpt.image import preload  # noqa: F401 - while nobody waits yet: each caller would import it for itself

    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 64)
        except OSError:
            data, fds = b"", []
        if not data:
            break
        pid = os.fork()
        if pid == 0:
            control.close()
            reply = socket.socket(fileno=fds[0])
            status = 1
            try:
                reply.send(str(os.getpid()).encode())  # before the call: a controller that hears nothing knows that none was made
                _serve(json.loads(data), reply, backend, problem)
                for fd in fds[1:]:
                    os.close(fd)  # the claims: to close what else is open may take its time
                status = 0
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)
        _reap(os.WNOHANG)
    control.close()
    _reap(0)


def _serve(request: dict[str, Any], reply: socket.socket, backend: Driver | None, problem: Any) -> None:
    """One call, in a process of its own."""
    from gpuckpt.errors import GpuckptError
    from gpuckpt.inspect.processes import is_same

    call = Call(request["call"]) if request["call"] else None
    process = ProcessId(request["pid"], request["start_ticks"])
    forked.named(f"gpuckpt-{call or 'state'}")
    begun = time.monotonic()
    answer: dict[str, Any] = {"result": "SUCCESS"}
    if backend is None:
        answer = {"result": f"gpuckpt:{problem.code}", "message": problem.message}
    elif not is_same(process):
        answer = {"result": "SUCCESS", "state": State.GONE} if call is None else {"result": "STALE"}
    else:
        try:
            if call is None:
                answer["state"] = backend.state(process.pid)
            elif call is Call.LOCK:
                backend.lock(process.pid, request["timeout_s"])
            elif call is Call.CHECKPOINT:
                _checkpoint(backend, process)
            elif call is Call.RESTORE:
                _restore(backend, process, request)
            elif call in IMAGE_CALLS:
                answer["image"] = _move(call, backend, process, request["image"], reply)
            else:
                backend.unlock(process.pid)
        except CallError as e:
            answer = {"result": e.result, "failed_in": e.call}
        except GpuckptError as e:
            answer = {"result": f"gpuckpt:{e.code}", "message": e.message, "hint": e.hint}
        except Exception as e:  # noqa: BLE001 - whatever it is, the controller must hear of it
            answer = {"result": f"gpuckpt:{getattr(e, 'code', 'failed')}", "message": f"{type(e).__name__}: {e}"}
    if call is Call.LOCK and answer["result"] == "SUCCESS" and backend is not None and not is_same(process):
        with contextlib.suppress(CallError):  # it ended just before, and this is who has its pid now
            backend.unlock(process.pid)
        answer = {"result": "STALE"}
    answer["seconds"] = time.monotonic() - begun
    wanted = _send(reply, answer)
    if call is Call.LOCK and answer["result"] == "SUCCESS" and backend is not None:
        if wanted:
            with contextlib.suppress(OSError):
                wanted = reply.recv(16) == b"keep"  # stands by until the controller decides, or dies
        if not wanted and is_same(process):
            with contextlib.suppress(CallError):
                backend.unlock(process.pid)


def _checkpoint(backend: Driver, process: ProcessId) -> None:
    """Checkpoint; announced to the preload library meanwhile, if *process* has it. Nothing about that may keep the checkpoint."""
    from gpuckpt.image import keeper, page, preload

    with contextlib.ExitStack() as announced:
        if page.there(process):
            with contextlib.suppress(Exception):
                if keeper.dropped(process) and backend.state(process.pid) is State.LOCKED:
                    keeper.void(process)
                announced.enter_context(preload.announced(process, backend.restore_thread(process.pid)))
        try:
            backend.checkpoint(process.pid)
        except CallError:
            with contextlib.suppress(Exception):
                preload.forget(process)  # what was mapped for it is gone
            raise


def _restore(backend: Driver, process: ProcessId, request: dict[str, Any]) -> None:
    """Restore, unless the image is not whole in memory: whoever asks, and whatever their journal says."""
    from gpuckpt.image import keeper, page, preload

    if backend.image_dropped(process):
        from gpuckpt.image import store

        raise store.unknown(process)
    with contextlib.ExitStack() as announced:
        if known := page.there(process):
            with contextlib.suppress(Exception):
                announced.enter_context(preload.announced(process, backend.restore_thread(process.pid), preload.announce_restore))
        backend.restore(process.pid, request["gpu_map"], initialise=request["initialise"])
    if known:
        with contextlib.suppress(Exception):
            keeper.open_held(process)  # until we end
            preload.forget(process)


class _Abandoned(Exception):
    """Nobody waits for this call any more."""


def _move(call: Call, backend: Driver, process: ProcessId, spec: dict[str, Any], reply: socket.socket) -> dict[str, Any]:
    """Move the image of a checkpointed process between memory and disk. Given up once the controller has let go of us, or died."""
    from gpuckpt import errors
    from gpuckpt.image import store
    from gpuckpt.image.memory import Unavailable

    poll = select.poll()
    poll.register(reply, select.POLLRDHUP | select.POLLHUP)

    def check() -> None:
        if poll.poll(0):
            raise _Abandoned

    if backend.state(process.pid) is not State.CHECKPOINTED:
        raise errors.ImageNotStored(f"pid {process} is not suspended any more", hint="gpuckpt status", pid=process.pid)
    try:
        with backend.image(process) as memory:
            return store.serve(call, memory, process, spec, check)
    except Unavailable as error:
        cls = errors.ImageUnreadable if call is Call.LOAD else errors.ImageNotStored
        raise cls(
            f"pid {process} stays suspended as it is: {error}", hint="start it by `gpuckpt exec -- COMMAND`", pid=process.pid
        ) from error


def _send(reply: socket.socket, answer: dict[str, Any]) -> bool:
    try:
        reply.send(json.dumps(answer).encode())
    except OSError:
        return False
    return True


def _reap(flags: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, flags)[0] != 0:
            pass


if __name__ == "__main__":
    forked.unheeding("gpuckpt-callers")
    serve(socket.socket(fileno=int(os.environ.pop("GPUCKPT_CALLER_FD"))), sys.argv[1])
    os._exit(0)

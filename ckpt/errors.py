"""Every way a command can fail: one class a code, each with its exit status, what it concerns and what to type next.

``failures.md`` beside this file is docs/failures.md, with a paragraph for each code (``gpuckpt explain CODE``); a test keeps them together.
"""

from __future__ import annotations

from typing import Any, ClassVar


class GpuckptError(Exception):
    """Base of all errors of gpuckpt.

    ``message`` says what happened and in what state things are now, ``hint`` what to do next.
    ``report`` is set by an operation that had begun to act: it lists how each process was left.
    """

    code: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, hint: str = "", pid: int | None = None, gpu: str | None = None, step: str | None = None, report: Any = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.pid = pid
        self.gpu = gpu
        self.step = step
        self.report = report

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "hint": self.hint, "pid": self.pid, "gpu": self.gpu, "step": self.step}


class DriverError(GpuckptError):
    """A driver call failed for a reason without a class of its own; everything is as it was found."""

    code = "driver-error"


class NcclCallFailed(GpuckptError):
    """A call into NCCL failed. ``function`` and ``result`` (an ``ncclResult_t``) say which and how."""

    code = "nccl-call-failed"

    def __init__(self, message: str, *, function: str = "", result: int = 0, **concerns: Any) -> None:
        super().__init__(message, **concerns)
        self.function = function
        self.result = result


class OffloadFailed(GpuckptError):
    """The allocator of a process could not take its memory off the GPU; everything is as it was found."""

    code = "offload-failed"


class Aborted(GpuckptError):
    """The group changed while we worked (a CUDA process was born, one died); everything left is as it was found."""

    code = "group-changed"


class OtherHost(GpuckptError):
    """Another host of the operation failed, and it ended on all of them; everything here is as it was found."""

    code = "other-host"


class RendezvousLost(GpuckptError):
    """The store of a rendezvous cannot be reached; nothing had been checkpointed, everything here is as it was found."""

    code = "rendezvous-lost"


class JournalError(GpuckptError):
    """The journal cannot be written or read; nothing was touched."""

    code = "journal"


class Usage(GpuckptError):
    code = "usage"
    exit_code = 2


class ProtectedProcess(Usage):
    """pid 1, gpuckpt itself or one of its own ancestors."""

    code = "protected-process"


class NotAProcess(Usage):
    """A thread id where a process id belongs, or a kernel thread."""

    code = "not-a-process"


class NameTaken(Usage):
    """Another run has the name, or something that is not ours lies where its socket belongs; nothing was started."""

    code = "name-taken"


class Lost(GpuckptError):
    """The GPU state of a process cannot be brought back."""

    code = "lost"
    exit_code = 3


class WrongAnswer(Lost):
    """A server was resumed and answers the golden prompt in another way than before; nobody else was let in."""

    code = "wrong-answer"


class CommunicatorBroken(Lost):
    """A communicator is neither usable nor suspended: its suspend broke half-way, or it does not work after its resume."""

    code = "communicator-broken"


class InFlight(GpuckptError):
    """A driver call has not returned; its caller was left to itself and will undo a lock when it does."""

    code = "in-flight"
    exit_code = 3


class NotAsFound(GpuckptError):
    """The way back is blocked for now (room on the GPU, a refused restore); ``gpuckpt resume`` tries it again."""

    code = "not-as-found"
    exit_code = 3


class Unexpected(GpuckptError):
    """A fault in gpuckpt itself, outside of an operation: what it had begun is not known here."""

    code = "unexpected"
    exit_code = 3


class Held(GpuckptError):
    """After the commit, another host or the store fell silent: the processes here wait as they are for a resume of all hosts."""

    code = "held"
    exit_code = 3


class NoSuchProcess(GpuckptError):
    code = "no-such-process"
    exit_code = 4


class NoCudaState(GpuckptError):
    code = "no-cuda-state"
    exit_code = 4


class PermissionDenied(GpuckptError):
    code = "permission"
    exit_code = 5


class Refused(GpuckptError):
    """Base of refusals: nothing was touched."""

    code = "refused"
    exit_code = 6


class Stopped(Refused):
    code = "stopped"


class PossibleImport(Refused):
    code = "possible-import"


class NcclCommunicator(Refused):
    code = "nccl-communicator"


class Rdma(Refused):
    code = "rdma"


class Mps(Refused):
    code = "mps"


class Mig(Refused):
    code = "mig"


class ManagedMemory(Refused):
    code = "managed-memory"


class HostMemory(Refused):
    code = "host-memory"


class GpuMemory(Refused):
    code = "gpu-memory"


class GpuUnknown(Refused):
    code = "gpu-unknown"


class GpuLost(Refused):
    code = "gpu-lost"


class GpuChanged(Refused):
    code = "gpu-changed"


class SeveralHosts(Refused):
    """The group has a part on other hosts: it comes back together with them, or one of them is not part of it."""

    code = "several-hosts"


class RendezvousKey(Refused):
    """A rendezvous needs a key, or a value in its store was not written with ours."""

    code = "rendezvous-key"


class NoDriver(Refused):
    code = "no-driver"


class DriverTooOld(Refused):
    code = "driver-too-old"


class BindingsTooOld(Refused):
    code = "bindings-too-old"


class Deadline(GpuckptError):
    """The deadline passed; everything is as it was found."""

    code = "deadline"
    exit_code = 124


class Busy(Deadline):
    """Another gpuckpt is at work on the same process or GPU."""

    code = "concurrent-operation"


class HostMissing(Deadline):
    """A host did not come to the rendezvous, or fell silent before anything was checkpointed; everything here is as it was found."""

    code = "host-missing"


class StillServing(Deadline):
    """Requests were still running when the time to drain had passed, or what their clients left; the server stays awake."""

    code = "still-serving"


class CannotStart(GpuckptError):
    """The command of a run could not be started; ``status`` is what the run exits with."""

    code = "cannot-start"
    status = 127


class RunSilent(GpuckptError):
    """A run does not answer, nor say how it is; what it was asked may still be done."""

    code = "run-silent"
    exit_code = 3


class CannotListen(GpuckptError):
    """A run cannot listen where its clients, its admin or its commands would come, or its command cannot: another does, or it is no address
    of ours."""

    code = "cannot-listen"


class ServerRefused(GpuckptError):
    """A supervised server did not do what was asked over HTTP: sleep, wake up, or tell its health."""

    code = "server-refused"


class RunNotReady(GpuckptError):
    """The run is starting, stopping or over, or has failed: it can be neither suspended nor resumed now."""

    code = "run-not-ready"


class Leased(GpuckptError):
    """A lease or a swap keeps the run from its GPUs; it stays suspended until that ends."""

    code = "leased"


class NoPreload(Refused):
    """Keeping an image on disk takes the preload library in the process, and it is not there."""

    code = "no-preload"


class NoPool(Refused):
    """``--method pool`` of a process without an agent, or of which nothing lies in a pool; nothing was touched."""

    code = "no-pool"


class ImageDirectory(Refused):
    """An image cannot be kept where it was asked to be: no such directory, no room, no permission."""

    code = "image-directory"


class ImageNotStored(NotAsFound):
    """The processes are suspended, but an image is not on disk as it was asked to be; it stays in host memory."""

    code = "image-not-stored"


class ImageUnreadable(NotAsFound):
    """An image on disk cannot be read, or is not what was written; its process stays suspended."""

    code = "image-unreadable"


class Interrupted(GpuckptError):
    """Ctrl-C or a signal; everything is as it was found."""

    code = "interrupted"
    exit_code = 130

    def __init__(self, message: str, *, signum: int = 2, **concerns: Any) -> None:
        super().__init__(message, **concerns)
        self.signum = signum


def by_code() -> dict[str, type[GpuckptError]]:
    """Every error class by its code."""
    found: dict[str, type[GpuckptError]] = {}
    stack: list[type[GpuckptError]] = [GpuckptError]
    while stack:
        cls = stack.pop()
        found.setdefault(cls.code, cls)
        stack.extend(cls.__subclasses__())
    return found


def exit_code(error: GpuckptError) -> int:
    """The exit status for *error*: 128 + signal for an interruption, else its class's."""
    return 128 + error.signum if isinstance(error, Interrupted) else error.exit_code

"""Words for what a call did not do: which error it is, in what state the process is now, and what to type next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuckpt import errors
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Call, Outcome, ProcessId, State
from gpuckpt.words import let_go


def left_in_flight(who: str, call: Call, process: ProcessId, caller_pid: int, *, halted: str, interrupted: bool) -> GpuckptError:
    """A driver's *call* that had not returned by the deadline, or when somebody would not wait for it (*interrupted*)."""
    until = _until(interrupted=interrupted)
    then = "it unlocks itself when the driver grants it" if call is Call.LOCK else f"the driver goes on with the {call}"
    first = f"pid {process} is {halted}: {let_go(halted, [process.pid])}, then " if halted else "when it has ended, "
    return errors.InFlight(
        f"{call} of {who} had not returned {until}; its caller (pid {caller_pid}) was left to itself: {then}",
        hint=f"{first}gpuckpt recover",
        pid=process.pid,
        step=call,
    )


def _until(*, interrupted: bool) -> str:
    return "when it was interrupted a second time" if interrupted else "by the deadline"


def agent_in_flight(who: str, call: Call, process: ProcessId, gone: Sequence[ProcessId] = (), *, interrupted: bool) -> GpuckptError:
    """*gone*: ranks of its group that have ended; who shares a communicator with one waits for it inside NCCL."""
    hint = "when it has answered, or been ended: gpuckpt recover"
    said = f"the agent of {who} had not done its {call} {_until(interrupted=interrupted)}"
    if gone and call in (Call.COMMS, Call.COMMS_RESUME):
        ended = f"pid {', '.join(map(str, gone))} of its group ended, for whom it waits if they share a communicator"
        said = f"the agent of {who} has not done its {call}: {ended}"
        hint = f"end the job, and start it again: kill -9 {process}"
    return errors.InFlight(said, hint=hint, pid=process.pid, step=call)


def of_agent(who: str, call: Call, process: ProcessId, outcome: Outcome) -> GpuckptError:
    """What an agent could not do. Communicators that broke on the way are broken for good."""
    where: dict[str, Any] = {"pid": process.pid, "step": str(call)}
    failed = outcome.result == "agent:FAILED"
    if outcome.result == "agent:REFUSED" and call is Call.QUIESCE:
        said = f"{who}, when it stood at its safe point: {outcome.message}; nothing was suspended"
        return errors.PossibleImport(said, hint="start the job without it (gpuckpt env)", **where)
    if outcome.result == "agent:CHANGED":
        said = f"{who}, when it stood at its safe point: {outcome.message}; nothing was suspended"
        return errors.Aborted(said, hint=f"try again: gpuckpt suspend {process}", **where)
    if outcome.result == "agent:REFUSED":
        said = f"{who} could not suspend its communicators, which are as they were: {outcome.message}"
        return errors.NcclCommunicator(said, hint="start the job without what is named (gpuckpt env), or let go of it", **where)
    if outcome.result == "agent:NOT_READY":
        hint = "a longer --timeout" + (", or call it in its loop" if "checkpoint_here" in outcome.message else "")
        return errors.Deadline(f"{who}: {outcome.message}; it goes on running", hint=hint, **where)
    if failed and call is Call.OFFLOAD:
        hint = f"see to what it says, and suspend again; or let the driver take all of it: gpuckpt suspend {process} --method driver"
        return errors.OffloadFailed(f"{who} could not take its memory off the GPU: {outcome.message}", hint=hint, **where)
    if failed and call is Call.ONLOAD:
        return errors.NotAsFound(
            f"{who} could not bring its memory back onto the GPU: {outcome.message}. It stands still, and nothing is lost",
            hint=f"make room on its GPU, then: gpuckpt resume {process}",
            **where,
        )
    if failed and call in (Call.COMMS, Call.COMMS_RESUME, Call.UNQUIESCE):
        what = "resume and verify" if call is Call.COMMS_RESUME else "suspend"
        hint = f"end the job and start it again: kill -9 {process}"
        return errors.Lost(f"{who} could not {what} its communicators: {outcome.message}", hint=hint, **where)
    if outcome.result == "agent:DROPPED":
        return errors.Aborted(f"{call} of {who}: {outcome.message}", **where)
    said = f"the agent of {who} did not begin its {call}: {outcome.message}"
    if call is Call.QUIESCE:
        return errors.Busy(said, hint="gpuckpt recover", **where)
    return errors.InFlight(said, hint=f"when it has done so, or been ended (kill -9 {process}): gpuckpt recover", **where)


def of_call(
    who: str,
    call: Call,
    process: ProcessId,
    outcome: Outcome,
    state: State,
    *,
    command: str,
    gpu_map: Mapping[str, str],
    movable: bool,
) -> GpuckptError:
    """A failed call. *state*: what the driver says of the process now. *movable*: its own allocator can take memory off the GPU."""
    where: dict[str, Any] = {"pid": process.pid, "step": str(call)}
    if outcome.result.startswith("agent:") and state is not State.GONE:
        return of_agent(who, call, process, outcome)
    if outcome.result.startswith("gpuckpt:"):
        cls = errors.by_code().get(outcome.result[8:], GpuckptError)
        return cls(outcome.message or outcome.result, hint=outcome.hint or "gpuckpt doctor", **where)
    if state is State.GONE:
        return errors.Aborted(f"{who} ended during {call}", **where)
    if call is Call.RESTORE and state is State.CHECKPOINTED and gpu_map and outcome.result == "INVALID_VALUE":
        return errors.NotAsFound(
            f"the driver refused to restore {who} by this map of GPUs (CUDA_ERROR_INVALID_VALUE); it is still suspended",
            hint=f"on the GPUs that it came from: gpuckpt resume {process}",
            **where,
        )
    if call is Call.RESTORE and state in (State.CHECKPOINTED, State.FAILED) and outcome.answered:
        return errors.Lost(
            f"restore of {who} failed (CUDA_ERROR_{outcome.result}); its GPU state cannot be brought back",
            hint=f"end it and start it again: kill -9 {process}",
            **where,
        )
    if call is Call.LOCK and outcome.result == "NOT_READY":
        return errors.Deadline(
            f"{who} was busy on the GPU beyond the deadline; it goes on running",
            hint="a longer --timeout, or suspend it between two steps of its work",
            **where,
        )
    if call is Call.CHECKPOINT and outcome.result == "NOT_SUPPORTED":
        return errors.ManagedMemory(
            f"the driver cannot checkpoint {who}: CUDA_ERROR_NOT_SUPPORTED, as for managed memory (cudaMallocManaged)",
            hint="start the program without managed memory (torch and vLLM use none by default)"
            + (f"; or let its pool alone leave: gpuckpt suspend {process} --method pool" if movable else ""),
            **where,
        )
    if state is State.DENIED:
        return errors.PermissionDenied(f"the driver does not let us touch {who}", hint=f"sudo gpuckpt {command} {process}", **where)
    return errors.DriverError(f"{call} of {who} failed: CUDA_ERROR_{outcome.result}; the driver says it is {state}", **where)

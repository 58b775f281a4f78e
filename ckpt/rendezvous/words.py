"""What a person reads of an operation that ended: which host, which process, and what to type next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuckpt import errors
from gpuckpt.errors import GpuckptError

Where = Callable[[int | None, str], str]


def reason(cause: dict[str, Any], where: Where) -> str:
    """The root cause in one clause: on which host, and what."""
    if cause["code"] == "host-missing":
        missing = [where(n, "") for n in cause["missing"]] or ["another host"]
        are = "has" if len(missing) == 1 else "have"
        return f"{', '.join(missing)} {are} not come to the step {cause['step']!r} in time"
    ranks = f" ({', '.join(cause['ranks'])})" if cause.get("ranks") else ""
    return f"{where(cause.get('node'), cause.get('host', ''))}: {cause['message']}{ranks}"


def ended(cause: dict[str, Any], where: Where, earlier: dict[str, Any] | None, interruptions: Sequence[int] = ()) -> GpuckptError:
    """The error of an operation that ended on all hosts before anything was checkpointed, or whose checkpoints are taken back."""
    if cause["code"] == "interrupted" and interruptions:
        return errors.Interrupted("interrupted; everything is as it was found", signum=interruptions[0])
    text = reason(cause, where)
    if cause.get("node") is None:
        text = cause["message"]  # what all hosts together are refused for
    hint = cause.get("hint", "")
    if cause["code"] == "host-missing":
        hint = "start the same command there too, with the same rendezvous; or a longer --timeout"
        if earlier is not None:
            text += f" (the operation before this one ended by {reason(earlier, where)})"
    cls = errors.by_code().get(cause["code"], errors.OtherHost)
    if cause.get("missing") is None and (cls.exit_code == 3 or not issubclass(cls, errors.Refused | errors.Deadline)):
        cls = errors.OtherHost
    return cls(f"{text}; it was ended on all hosts", hint=hint, step=cause.get("step"))


def no_place(kind: str, who: dict[str, Any], interruptions: Sequence[int], nodes: int) -> GpuckptError:
    """Why there is no part for this host in the rendezvous."""
    if kind == "interrupted":
        return errors.Interrupted("interrupted; everything is as it was found", signum=interruptions[0])
    if kind == "other-nodes":
        return errors.Usage(
            f"host {who['by']} began this operation with --nodes {who['nodes']}, here it is {nodes}; nothing was touched",
            hint="the same --nodes on every host",
        )
    if kind == "place-taken":
        return errors.Busy(
            f"pid {who['pid']} of host {who['host']} has the place of node {who['node']} in this rendezvous; nothing was touched",
            hint="a different --node-rank on every host; or, if that gpuckpt is dead, another NAME in --rendezvous",
        )
    return errors.Busy(
        f"a {who['command']} that host {who['by']} began in this rendezvous is not over; nothing was touched",
        hint="wait for it; or, if those gpuckpt are dead, another NAME in --rendezvous",
    )

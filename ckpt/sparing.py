"""Keeps the kernel's out-of-memory killer from a suspended group, whose images make its processes the largest on the machine.

What a process had before is in the journal before it is changed, and set back when the process runs again, also by ``recover``.
"""

from __future__ import annotations

from pathlib import Path

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.model import State
from gpuckpt.walk import Walk


def spare(walk: Walk, score_adj: int) -> None:
    """Set the ``oom_score_adj`` of the suspended group to *score_adj*. Where that fails it warns: the group is suspended all the same."""
    assert walk.record is not None
    members = [m for m in walk.record.members if walk.is_down(m.id) and not m.lost and not m.along]
    for m in members:
        before = _read(m.id.pid)
        if m.oom_score_adj is None and before is not None:
            walk.record = walk.record.with_member(m.id, oom_score_adj=before)
    try:
        walk.save(required=True)
    except errors.JournalError as error:
        walk.warnings.append(f"the oom_score_adj was not changed: {error.message}")
        return
    for m in members:
        if processes.is_same(m.id) and (why := _write(m.id.pid, score_adj)):
            walk.warnings.append(f"the oom_score_adj of pid {m.id} stays {_read(m.id.pid)}: {why} (to lower it takes CAP_SYS_RESOURCE)")


def tidy(walk: Walk) -> None:
    """Set it back for those that are suspended no longer. One that somebody has changed meanwhile is set back too."""
    assert walk.record is not None
    for m in walk.record.members:
        if m.oom_score_adj is not None and not walk.is_down(m.id) and walk.now.get(m.id) is not State.BLOCKED:
            if processes.is_same(m.id) and (why := _write(m.id.pid, m.oom_score_adj)):
                walk.warnings.append(f"the oom_score_adj of pid {m.id} could not be set back to {m.oom_score_adj}: {why}")
            walk.record = walk.record.with_member(m.id, oom_score_adj=None)


def _path(pid: int) -> Path:
    return Path(f"/proc/{pid}/oom_score_adj")


def _read(pid: int) -> int | None:
    try:
        return int(_path(pid).read_text())
    except (OSError, ValueError):
        return None


def _write(pid: int, score_adj: int) -> str:
    """Why it could not be written; "" if it was."""
    try:
        _path(pid).write_text(f"{score_adj}\n")
    except OSError as error:
        return error.strerror or str(error)
    return ""

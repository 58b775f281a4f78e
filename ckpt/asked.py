"""What may be asked for at all: a program's arguments are refused in the words in which a person's are, before anything is looked at."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpuckpt.errors import Usage
from gpuckpt.model import ACCEPTABLE_HAZARDS, METHODS

NO_DURATION = "a duration is greater than 0 and finite"


def is_duration(seconds: float) -> bool:
    """Whether *seconds* can be waited for: a NaN cannot."""
    return 0 < seconds < 1e9


def check(
    command: str,
    pids: Sequence[int] | None = None,
    *,
    along: Collection[int] = (),
    accept_loss: Collection[str] = (),
    method: str = "auto",
    oom_score_adj: int | None = None,
    timeout_s: float | None = None,
    wait_s: float = 0.0,
) -> None:
    """Raise :class:`gpuckpt.errors.Usage` for an argument of *command* that makes no sense. *pids*: None where it needs none."""
    if pids is not None and not pids:
        raise Usage(f"{command}: no pid was given", hint="gpuckpt ps lists the processes that can be suspended")
    for pid in (*(pids or ()), *along):
        if not isinstance(pid, int) or pid < 1:
            raise Usage(f"{pid!r} is not a pid", hint="gpuckpt ps lists the processes that can be suspended")
    if isinstance(accept_loss, str):
        raise Usage(f"accept_loss={accept_loss!r}: a collection of kinds, such as [{accept_loss!r}]")
    for kind in accept_loss:
        _one_of("accept_loss", kind, ACCEPTABLE_HAZARDS)
    _one_of("method", method, METHODS)
    if oom_score_adj is not None and not (isinstance(oom_score_adj, int) and -1000 <= oom_score_adj <= 1000):
        raise Usage(f"oom_score_adj: {oom_score_adj!r} is not in the range -1000<=x<=1000")
    _seconds("timeout_s", timeout_s)
    _seconds("wait_s", wait_s or None)  # 0: not at all


def _one_of(name: str, word: object, words: Sequence[str]) -> None:
    if word not in words:
        raise Usage(f"{name}: {word!r} is not one of {', '.join(map(repr, words))}")


def _seconds(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, int | float) and is_duration(value)):
        raise Usage(f"{name}: {value!r}: {NO_DURATION}, in seconds")

"""How long an operation may take, and how long one of its calls is waited for beyond that."""

from __future__ import annotations

from gpuckpt import errors, plan
from gpuckpt.model import Call

#: How long a call that moves nothing is waited for beyond the deadline, in seconds: an unlock takes 2 ms, and is what makes an end of it.
GRACE_S = 2.0
#: Nobody who asks for a short timeout wants to wait for all of that; and with less a call that was just made would count as hanging.
LEAST_GRACE_S = 0.5


class Deadline:
    """Of one operation that began at *begun* (monotonic). Without *timeout_s* it gets what its bytes may take, once they are known."""

    def __init__(self, begun: float, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._begun = begun
        self.at = begun + (timeout_s if timeout_s is not None else plan.default_timeout_s(0))

    def set(self, nbytes: int, extra_s: float = 0.0) -> None:
        """*nbytes* are to be moved."""
        if self.timeout_s is None:
            self.timeout_s = plan.default_timeout_s(nbytes) + extra_s
        self.at = self._begun + self.timeout_s

    def limit(self, call: Call, begun: float, nbytes: int) -> float:
        """When a *call* that began at *begun* and has not returned is left to itself. One that moves memory gets as long as its bytes may
        take: it cannot be cancelled."""
        grace_s = max(LEAST_GRACE_S, min(GRACE_S, self.timeout_s or GRACE_S))
        return max(self.at, begun) + (self.patience_s(nbytes) if call in plan.MOVES_BYTES else grace_s)

    def patience_s(self, nbytes: int) -> float:
        """How long a checkpoint or restore of *nbytes* may take beyond the deadline."""
        return max(plan.default_timeout_s(nbytes) - plan.default_timeout_s(0), self.timeout_s or 0.0, GRACE_S)

    @property
    def limit_s(self) -> float:
        """What the operation may take, in seconds."""
        return self.at - self._begun

    def check(self, now: float, step: str) -> None:
        """Raise before *step*, if it has passed."""
        if now >= self.at:
            raise errors.Deadline(f"the deadline passed before {step}; everything is as it was found", hint="a longer --timeout", step=step)

"""What nobody has thought of: made into errors that a run knows how to live with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gpuckpt.errors import GpuckptError

log = logging.getLogger("gpuckpt.run")


def known(error: BaseException) -> GpuckptError:
    """*error*, or one of ours for it: a mistake here, or a machine that has run short. That is logged with where it came from."""
    if isinstance(error, GpuckptError):
        return error
    log.error("%s", type(error).__name__, exc_info=error)
    return GpuckptError(words_of(error), hint="see what the run logged")


def words_of(error: BaseException) -> str:
    """What it is, and what it says, if anything: that a time has passed, for one, says nothing."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def tell_safely(tell: Callable[..., None], *facts: Any) -> None:
    """Whoever cannot be told keeps the run from nothing."""
    try:
        tell(*facts)
    except Exception:
        log.exception("what happened could not be told")

"""Where the program begins: a Ctrl-C while it is still being loaded ends it without a word. Before this comes Python's own start.

What takes longest is begun before the command line is looked at in earnest: the driver's helper and NVML. The rest is imported meanwhile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

#: Commands about processes, for which the driver is asked.
ASKING = frozenset({"ps", "status", "is-suspended", "suspend", "resume"})


def main() -> None:
    """The program ``gpuckpt``."""
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as it is for a job in the background
            signal.signal(signal.SIGINT, quit_at_once)
        if asks(sys.argv[1:]):
            from gpuckpt import early

            early.ahead()
        from gpuckpt.cli.main import main as begin
    except KeyboardInterrupt:
        quit_at_once()
    begin()


def asks(words: Sequence[str]) -> bool:
    """Whether *words* are a command that will ask the driver, as a first look tells: neither about a run by its name nor for help."""
    if not words or words[0] not in ASKING or "--help" in words:
        return False
    return any(w.isdecimal() for w in words[1:]) or (words[0] in ("ps", "status") and all(w.startswith("-") for w in words[1:]))


def quit_at_once(*_: Any) -> None:
    """Until a command begins, which has its own words for it (:meth:`gpuckpt.cli.main.Lazy.invoke`): nothing was touched."""
    os._exit(130)

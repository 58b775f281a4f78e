"""Where the program begins: a Ctrl-C while it is still being loaded ends it without a word. Before this comes Python's own start."""

from __future__ import annotations

import os
from typing import Any


def main() -> None:
    """The program ``gpuckpt``."""
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as it is for a job in the background
            signal.signal(signal.SIGINT, quit_at_once)
        from gpuckpt.cli.main import main as begin
    except KeyboardInterrupt:
        quit_at_once()
    begin()


def quit_at_once(*_: Any) -> None:
    """Until a command begins, which has its own words for it (:meth:`gpuckpt.cli.main.Lazy.invoke`): nothing was touched."""
    os._exit(130)

"""Signals of a program that stands at its safe point: heard when it goes on.

A handler may raise (Ctrl-C does), and the program would leave, use memory that is away, and lose what it wanted to save.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """The program's own handlers are called when the block is left, once for each signal that came, and not before. What ends a process or
    stops it without a handler of Python's does so at once. Handlers are the main thread's affair: in any other this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {n: h for n in signal.valid_signals() if callable(h := signal.getsignal(n))}
    came: list[int] = []
    over = False

    def handle(number: int, frame: FrameType | None) -> None:
        if over:  # one that raised kept us from putting all of them back
            handlers[signal.Signals(number)](number, frame)
        elif number not in came:
            came.append(number)

    try:
        for number in handlers:
            signal.signal(number, handle)
        yield
    finally:
        over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _raise(came)


def _raise(came: list[int]) -> None:
    """Each of them, whatever the handlers of the others raise."""
    if came:
        try:
            signal.raise_signal(came.pop(0))
        finally:
            _raise(came)

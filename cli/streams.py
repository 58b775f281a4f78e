"""stdout and stderr that may be closed, full, or read by nobody: what a command has done does not depend on who hears of it."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO


class _Raw(io.FileIO):
    """Writes what can be written. What cannot is dropped, and ``error`` says why."""

    error: OSError | None = None
    begun = False  # somebody has had some of it

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # non-blocking, as some parents leave it
                select.select([], [self], [])
        except OSError as e:
            self.error = self.error or e
            return len(data)
        self.begun = True
        return written


def secure() -> None:
    """From here on nothing that is printed raises. Descriptors 0 to 2 are taken, so that no file of ours is opened as one of them.

    A stream that is not the interpreter's own (a test's) is left alone.
    """
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        os.open(os.devnull, os.O_WRONLY if fd == 0 else os.O_RDONLY)  # the lowest one free is this one; its use fails as before
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, sys.stderr)


def _stream(fd: int, was: TextIO | None) -> TextIO:
    raw = _Raw(fd, "w", closefd=False)
    errors = was.errors if was is not None and was.errors not in (None, "strict") else "backslashreplace"
    encoding = was.encoding if was is not None else "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=fd == 2 or raw.isatty())


def unwritten() -> OSError | None:
    """Why something that went to stdout was not written, if so."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, _Raw) else None


def settle() -> None:
    """Write what is still held back, and say on stderr if stdout could not be written.

    Who reads its beginning alone (``| head``) is told nothing.
    """
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if (error := unwritten()) and not (isinstance(error, BrokenPipeError) and getattr(raw, "begun", False)):
        print(f"gpuckpt: the output could not be written to stdout: {error.strerror}; the exit status says how it went", file=sys.stderr)
    sys.stderr.flush()

"""Progress on stderr while bytes leave or return: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuckpt.telling import Progress

MOVING = {"checkpoint": "leaving the GPU", "restore": "returning to the GPU"}


class Bar:
    """Hands ``tell`` and ``watch`` to an operation: a bar where somebody looks, elsewhere only what must be said."""

    def __init__(self, quiet: bool) -> None:
        self._shown: Any = None
        self._task: Any = None
        self._said = ""
        self.watch = not quiet and sys.stderr.isatty()
        self.tell = None if quiet else self._told if self.watch else self._said_once

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._shown is not None:
            self._shown.stop()

    def _said_once(self, progress: Progress) -> None:
        if progress.message and progress.message != self._said:
            self._said = progress.message
            print(progress.message, file=sys.stderr, flush=True)

    def _told(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        if self._shown is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
            self._shown = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._shown.add_task("looking", total=None)
            self._shown.start()
        if progress.message and progress.message != self._said:
            self._said = progress.message
            self._shown.console.print(progress.message)
        words = MOVING.get(progress.step, progress.step)
        if progress.step in MOVING and progress.bytes_start and progress.bytes_now is not None:
            now = min(progress.bytes_now, progress.bytes_start)
            done = progress.bytes_start - now if progress.step == "checkpoint" else now
            self._shown.update(self._task, description=words, total=progress.bytes_start, completed=done)
        else:
            self._shown.update(self._task, description=words)

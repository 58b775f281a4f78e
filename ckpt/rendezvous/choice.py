"""Where a host meets the others, as a person or a program chose it. Nothing of a rendezvous is imported where none was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from gpuckpt import errors

if TYPE_CHECKING:
    from gpuckpt.barrier import Barrier
    from gpuckpt.model import ProcessId
    from gpuckpt.rendezvous.host import Clock


class Choice(NamedTuple):
    """Without a *url* the operation is about this host alone."""

    url: str | None
    nodes: int | None
    node: int | None
    key_file: str | None

    def check(self, *, dry_run: bool = False) -> None:
        """Raise :class:`gpuckpt.errors.Usage` for what does not go together."""
        if self.url is None and (self.nodes, self.node, self.key_file) != (None, None, None):
            raise errors.Usage("--nodes, --node-rank and --rendezvous-key belong to a --rendezvous")
        if self.url is not None and self.nodes is None:
            raise errors.Usage("--rendezvous needs --nodes: on how many hosts the command is typed")
        if self.url is not None and dry_run:
            raise errors.Usage("--dry-run looks at this host alone: leave out --rendezvous")

    def refuse_run(self) -> None:
        if self.url is not None:
            raise errors.Usage("a run is on one host: leave out --rendezvous, or name pids")

    @contextmanager
    def barrier(self, clock: Clock, command: str, timeout_s: float | None, *, me: ProcessId, boot_id: str) -> Iterator[Barrier | None]:
        """The other hosts, reached; None where there are none. *me* is the process that operates, on the boot *boot_id*."""
        self.check()
        if self.url is None or self.nodes is None:
            yield None
            return
        from gpuckpt.rendezvous.meet import rendezvous

        key_file = self.key_file or ""
        made = rendezvous(
            clock,
            self.url,
            command=command,
            nodes=self.nodes,
            node=self.node,
            key_file=key_file,
            me=me,
            boot_id=boot_id,
            timeout_s=timeout_s,
        )
        with made as reached:
            yield reached

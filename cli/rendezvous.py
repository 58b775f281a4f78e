"""The options of a command that several hosts carry out together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuckpt import errors

if TYPE_CHECKING:
    from gpuckpt.barrier import Barrier
    from gpuckpt.local import LocalWorld

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was typed. Without a rendezvous the command is about this host alone."""

    url: str | None
    nodes: int | None
    node: int | None
    key_file: str | None

    def check(self, *, dry_run: bool) -> None:
        """Raise :class:`gpuckpt.errors.Usage` for options that do not go together."""
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
    def barrier(self, world: LocalWorld, command: str, timeout_s: float | None) -> Iterator[Barrier | None]:
        """The other hosts, reached."""
        if self.url is None or self.nodes is None:
            yield None
            return
        from gpuckpt.rendezvous.meet import rendezvous

        with rendezvous(
            world,
            self.url,
            command=command,
            nodes=self.nodes,
            node=self.node,
            key_file=self.key_file or "",
            me=world.me,
            boot_id=world.journal.boot_id,
            timeout_s=timeout_s,
        ) as reached:
            yield reached


def rendezvous_options(f: F) -> F:
    """Adds the options; the command gets them as ``rendezvous``, ``nodes``, ``node_rank`` and ``rendezvous_key``."""
    for option in (
        click.option("--rendezvous-key", metavar="FILE", help="The key by which the hosts know one another's words: the same on each."),
        click.option("--node-rank", type=click.IntRange(0), metavar="R", help="Which of the hosts this is. [default: a free place]"),
        click.option("--nodes", type=click.IntRange(1), metavar="N", help="On how many hosts the command is typed."),
        click.option(
            "--rendezvous",
            metavar="URL",
            help="One operation with the same command on other hosts: c10d://HOST:PORT/NAME or file:///SHARED/DIRECTORY/NAME.",
        ),
    ):
        f = option(f)
    return f

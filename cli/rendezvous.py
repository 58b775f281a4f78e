"""The options of a command that several hosts carry out together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


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

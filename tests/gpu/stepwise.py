"""A `gpuckpt` command that stops before one of its steps until it is told to go on. usage: STEPWISE=STEP:TELL_FD:GO_FD stepwise.py COMMAND…

Just before STEP begins it writes a line to TELL_FD and reads a byte from GO_FD, and else is the command as installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gpuckpt.cli.main import main
from gpuckpt.walk import Walk

wanted, tell, go = os.environ.pop("STEPWISE").split(":")
plain = Walk.step


@contextmanager
def step(walk: Walk, name: str) -> Iterator[None]:
    global wanted  # noqa: PLW0603
    if str(name) == wanted:
        wanted = ""
        os.write(int(tell), b"there\n")
        os.read(int(go), 1)
    with plain(walk, name):
        yield


Walk.step = step  # type: ignore[method-assign,assignment]
sys.argv[0] = "gpuckpt"
main()

"""``python -m gpuckpt.agent SCRIPT ARGS…``: runs SCRIPT as ``python SCRIPT ARGS…`` would, with an agent in it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from gpuckpt.agent import install


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).exists():
        there = f"; there is no {sys.argv[1]} here" if len(sys.argv) > 1 else ""
        print(f"usage: python -m gpuckpt.agent SCRIPT ARGS…{there}", file=sys.stderr)
        raise SystemExit(2)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


main()

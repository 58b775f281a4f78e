"""How much the hosts of a suspend say to one another: whole suspends of 2 to 128 hosts in one process, on the real coordinators and stores.

usage: rendezvous.py             writes benchmarks/results/rendezvous.json (then: pictures.py)
       rendezvous.py --quick     the smallest and the largest, and writes nothing

No process is suspended: each host votes as soon as it may, so what is measured is the coordination alone. One after the other every host
does what it can until it waits, as fast as this machine can, so the seconds are of all hosts together.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from gpuckpt.rendezvous import judge
from gpuckpt.rendezvous.coordinator import Coordinator, Get, Moment, Pause, Put, Wish
from gpuckpt.rendezvous.file import FileStore
from gpuckpt.rendezvous.seal import Seal
from gpuckpt.rendezvous.store import Store

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/rendezvous.json"
HOSTS = (2, 4, 8, 16, 32, 64, 128)
RANKS_A_HOST = (1, 2, 4, 8)
FAR = 1e9


class Memory:
    """Registers in this process: the coordination without any store's cost."""

    open_to_others = ends = serving = False

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def compare_set(self, key: str, value: bytes) -> bytes:
        return self.values.setdefault(key, value)

    def close(self) -> None: ...


def host(coordinator: Coordinator, ranks: int) -> Generator[Wish, Any, None]:
    """All that one host of a suspend says: its ranks are in a communicator of the whole job, and in one of its host."""
    first, everybody = (coordinator.node or 0) * ranks, coordinator.nodes * ranks
    told = [[1000 + r, "torch:0", first + r, everybody, "2.30.7"] for r in range(ranks)]
    told += [[1000 + r, f"torch:host{coordinator.node}", r, ranks, "2.30.7"] for r in range(ranks)] if ranks > 1 else []
    info = {"already": False, "group": "", "committed": False, "journal": [], "patience_s": 60.0}
    verdict = yield from coordinator.join({**info, "pids": [1000 + r for r in range(ranks)], "ranks": told}, FAR)
    assert verdict["go"], verdict
    for step in coordinator.steps[2:]:
        verdict = yield from coordinator.vote(step, FAR)
        assert verdict["go"], verdict


def suspend(hosts: int, ranks: int, store: Store) -> dict[str, Any]:
    """One suspend: seconds of all hosts together, store operations, and how many of them found nothing yet."""
    ids, seal = itertools.count(), Seal("job", os.urandom(32))
    waiting: list[tuple[Generator[Wish, Any, None], Any]] = []
    for node in range(hosts):
        me = {"host": f"host{node}", "machine": str(node), "pid": 1, "start_ticks": 1}
        made = Coordinator("suspend", hosts, node, me, lambda _: False, judge.suspend, lambda: f"op{next(ids)}")
        waiting.append((host(made, ranks), None))
    operations = empty = nbytes = 0
    begun = time.perf_counter()
    while waiting:
        still = []
        for steps, sent in waiting:
            answer = sent
            try:
                while not isinstance(wish := steps.send(answer), Pause):
                    operations += 1
                    if isinstance(wish, Put):
                        value = seal.close(wish.key, wish.body)
                        nbytes += len(value)
                        data: bytes | None = store.compare_set(wish.key, value)
                    else:
                        assert isinstance(wish, Get)
                        data = store.get(wish.key)
                        empty += data is None
                    answer = None if data is None else seal.open(wish.key, data)
                still.append((steps, Moment(0.0, 0)))
            except StopIteration:
                pass
        waiting = still
    seconds = time.perf_counter() - begun
    return {
        "hosts": hosts,
        "ranks_a_host": ranks,
        "operations": operations,
        "found_nothing": empty,
        "bytes_written": nbytes,
        "seconds": round(seconds, 4),
    }


def c10d(address: tuple[str, int]) -> Store:
    from gpuckpt.rendezvous.c10d import C10dStore

    def nobody() -> None:
        raise RuntimeError("nobody serves")

    return C10dStore(*address, "job", nobody)


def measured(quick: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "rendezvous",
        "what": "one suspend, coordination only, all hosts in one process",
        "machine": {
            "date": time.strftime("%Y-%m-%d"),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "memory": [suspend(h, r, Memory()) for h in (HOSTS[::6] if quick else HOSTS) for r in RANKS_A_HOST],
    }
    with tempfile.TemporaryDirectory() as directory:
        for h in HOSTS[::6] if quick else HOSTS:
            document.setdefault("file", []).append(suspend(h, 8, FileStore(Path(directory) / f"job{h}")))
    try:
        import torch
    except ImportError:
        return document
    document["machine"]["torch"] = torch.__version__
    for i, h in enumerate(HOSTS[::6] if quick else HOSTS):
        store = c10d(("127.0.0.1", 29700 + i))
        document.setdefault("c10d", []).append(suspend(h, 8, store))
        store.close()
    return document


def main(arguments: list[str]) -> int:
    document = measured("--quick" in arguments)
    for kind in ("memory", "file", "c10d"):
        for row in document.get(kind, []):
            print(kind, row)
    if "--quick" not in arguments:
        RESULT.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

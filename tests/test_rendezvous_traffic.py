"""What hosts say to one another grows with the hosts, not with their ranks."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUSPEND = runpy.run_path(str(ROOT / "benchmarks/rendezvous.py"))


def test_store_operations_are_linear_in_hosts_and_know_nothing_of_ranks() -> None:
    suspend, memory = SUSPEND["suspend"], SUSPEND["Memory"]
    operations = {(h, r): suspend(h, r, memory())["operations"] for h in (2, 4, 8, 16, 128) for r in (1, 8)}
    a_host = (operations[4, 1] - operations[2, 1]) // 2
    assert all(count == operations[2, 1] + a_host * (h - 2) for (h, _), count in operations.items()), operations


def test_the_result_file_holds_what_is_claimed() -> None:
    """1,024 ranks on 128 hosts agree on a whole suspend within 5 s, on each store that was measured."""
    document = json.loads((ROOT / "benchmarks/results/rendezvous.json").read_text())
    for kind in ("memory", "file", "c10d"):
        (row,) = [r for r in document[kind] if (r["hosts"], r["ranks_a_host"]) == (128, 8)]
        assert row["seconds"] <= 5
        assert row["operations"] == SUSPEND["suspend"](128, 8, SUSPEND["Memory"]())["operations"]

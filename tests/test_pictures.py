"""Charts of results that are not there yet can be drawn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
DRAW = """
from charts import comparison, growth
from drawing import ticks
rows = [{"axis": a, "value": v, "cycle": c, "gib_on_gpu": v + 0.6, "suspend_wall_s": 0.3 + v / 100, "resume_wall_s": 0.2}
        for a in ("gib", "graphs") for v in (0, 5, 90) for c in (0, 1, 2)]
print(growth({"machine": {}, "rows": rows}).replace("\\n", " "))
tool = {"later_suspend_s": 8.6, "later_resume_s": 0.0, "left_mib": 0}
print(comparison({"machine": {}, "gib": 16.0, "summary": {"driver": tool, "gpuckpt": tool}}).replace("\\n", " "))
assert list(ticks(8.6)) == [0, 2.5, 5, 7.5, 10] and ticks(0.019)[-1] == 0.02, ticks(8.6)
"""


TELL = """
import tables
slopes = {k: {"per_step": 0.03, "plus_minus": 0.02} for k in tables.GROWTH}
rows = [{"requests": 64, "answered": 63, "same": True}, {"requests": 256, "answered": 256, "same": False}]
runs = [{"begun": "then", "rows": rows, "slopes": slopes}, {"begun": "cut short", "rows": rows[:1]}]
tables.result = lambda name: {"runs": runs}
print(tables.soak())
tables.result = lambda name: None
print(tables.soak())
"""


def test_a_soak_is_told_with_what_was_asked_and_its_intervals() -> None:
    told = subprocess.run([sys.executable, "-B", "-c", TELL], cwd=BENCHMARKS, capture_output=True, text=True, check=True).stdout
    assert "| then | 2 | 320, 319 | 1 of 2 | +0.030 ± 0.020 MiB |" in told
    assert "| cut short | 1 | 64, 63 | 1 of 1 | too short |" in told
    assert "Not yet run on a GPU" in told


SIDES = """
import tables_image
cycles = [{"method": m, "resume": 0, "gpu_mib": 45056, "down": {"checkpoint": s}, "up": {"restore": s / 2}}
          for m, s in (("alone", 30), ("driver", 4), ("auto", 1))]
found = {"vllm_sleep_exec": {"cycles": cycles}}
tables_image.result = found.get
print(tables_image.side_by_side())
"""


def test_a_server_with_the_library_and_without() -> None:
    told = subprocess.run([sys.executable, "-B", "-c", SIDES], cwd=BENCHMARKS, capture_output=True, text=True, check=True).stdout
    assert "`vllm serve`, 44.0 GiB" in told
    assert "| 30.00 s | 4.00 s | 15.00 s | 2.00 s | 1 |" in told


def test_growth_and_comparison() -> None:
    drawn = subprocess.run(
        [sys.executable, "-B", "-c", DRAW], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    growth, comparison = (ET.fromstring(words) for words in drawn)
    words = ["".join(picture.itertext()) for picture in (growth, comparison)]
    assert "not measured" in words[0]  # of processes there is no row
    assert "suspend 90.6: 1.20 s" in words[0]
    assert "8.60 s" in words[1]


RANKS = """
import tables_ranks
from charts import by_ranks
steps = {"down": {"comms": 0.3, "lock": 0.01, "checkpoint": 1.4}, "up": {"restore": 1.5, "comms-resume": 0.25}}
def server(n):
    cycles = [{"method": "driver", "suspend": 0, "resume": 0, "suspend_wall_s": 2.0 + n, "resume_wall_s": 2.1,
               **{way: {k: s * n for k, s in by.items()} for way, by in steps.items()}} for _ in range(3)]
    return {"cycles": [*cycles, {"method": "auto", "suspend": 0, "resume": 0}], "running_mib": [13754] * n, "machine": {}}
found = {f"vllm_tp{n}": server(n) for n in (2, 4)}
tables_ranks.result = found.get
print(tables_ranks.by_ranks())
del found["vllm_tp4"]
print(tables_ranks.by_ranks())
print(by_ranks({n: {**server(n), "cycles": tables_ranks.whole(server(n))} for n in (1, 2, 8)}, tables_ranks.GROWING).replace("\\n", " "))
"""


def test_growth_with_ranks() -> None:
    drawn = subprocess.run([sys.executable, "-B", "-c", RANKS], cwd=BENCHMARKS, capture_output=True, text=True, check=True).stdout
    assert "| 4 | 13.4 GiB | 1.20 s | 0.04 s | 5.60 s | 6.00 s | 1.00 s | 6.0 s | 2.1 s |" in drawn
    assert "With 1 and 8 it has **not yet run" in drawn
    assert "With 1, 4 and 8 it has" in drawn
    assert drawn.count("img/by-ranks.svg") == 1, "one row is no growth"
    picture = "".join(ET.fromstring(drawn.splitlines()[-1]).itertext())
    assert "checkpoint, 8 ranks: 11.200 s" in picture

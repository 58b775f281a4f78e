"""Cases that people met with other tools: each has a test that names it ("Case 12" in its docstring), or a line that says why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
#: What went wrong for somebody. Public reports are named in the tests.
CASES = {
    1: "an idle moment meets a request",
    2: "idle counted from the start of a request",
    3: "a service that nobody ever called",
    4: "scraping keeps it awake",
    5: "a client's discovery swaps through all models",
    9: "the requester gives up while its model loads",
    10: "twenty queued jobs and one chat",
    11: "the server refuses after the wait",
    12: "an error without a body",
    13: "a silent hold is cut by the load balancer",
    14: "API keys",
    19: "the sleep call reaches another server",
    20: "a stale socket after a crash",
    21: "an orphan keeps answering",
    22: "all that was held is let go at once",
    23: "a client that does not stream goes away",
    24: "a log without end",
    25: "healthy, but wrong",
    26: "the prompt cache is gone",
    33: "the memory query fails",
    34: "a card is lost while its process is suspended",
    35: "the suspended are not in the card's list of processes",
    36: "Ray's memory monitor",
    37: "the largest process is killed first",
    38: "a pod without a limit",
    39: "a wake fails and its caller tries again",
    40: "memory stays when its instance is gone",
    42: "a communicator reaches outside of the group",
    43: "one rank's pid",
    44: "data parallel",
    45: "more is left with tensor parallelism",
    47: "keys point at a cache that was discarded",
    48: "weights awake, cache asleep",
    49: "writing into memory that sleeps",
    50: "a tag that is awake already",
    51: "exit while asleep",
    52: "memory that a NIC can register",
    54: "the preload library is not visible inside",
    55: "images on a container's writable layer",
}
#: Those without a test. A line goes when a test comes.
WITHOUT: dict[int, str] = {}


def named() -> dict[int, list[str]]:
    """Case -> the tests whose docstring names it."""
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for numbers in re.findall(r"\b[Cc]ases? (\d+(?:(?:, | and )\d+)*)", ast.get_docstring(node) or ""):
                    for number in re.findall(r"\d+", numbers):
                        found.setdefault(int(number), []).append(f"{path.name}::{node.name}")
    return found


def test_every_case_has_a_test_or_a_reason() -> None:
    without = set(CASES) - set(named())
    assert without == set(WITHOUT), "no test names it, nor does WITHOUT; or WITHOUT says so still, and there is one"


def test_tests_name_no_other_cases() -> None:
    assert set(named()) <= set(CASES)

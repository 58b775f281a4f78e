"""`gpuckpt explain`: what the code at the end of a message means."""

from __future__ import annotations

import pytest

from gpuckpt import errors
from tests.simulated_machine import Machine


@pytest.mark.parametrize("word", ["gpu-memory", "[gpu-memory]"])
def test_a_code(machine: Machine, word: str) -> None:
    said = machine.gpuckpt("explain", word, json=False)
    assert said.code == 0
    assert said.stdout.startswith("gpu-memory: no room or no GPU at resume\n\nExit 6. A GPU has less free memory")
    assert "gpuckpt resume PID --wait 10m" in " ".join(said.stdout.split())
    assert not {"`", "](", "**"} & set(said.stdout)
    assert max(len(line) for line in said.stdout.splitlines()) <= 100


def test_every_code_and_those_of_an_exit_status(machine: Machine) -> None:
    rows = machine.gpuckpt("explain").document["failures"]
    assert {r["code"]: r["exit_code"] for r in rows} == {c: cls.exit_code for c, cls in errors.by_code().items()}
    assert all(r["text"].startswith(f"Exit {r['exit_code']}") and r["kind"] for r in rows)
    assert "several GPUs (docs/multi-gpu.md)" in next(r["text"] for r in rows if r["code"] == "rendezvous-key")
    of_five = machine.gpuckpt("explain", 5, json=False).stdout
    assert of_five.split() == ["Wrong", "target", "or", "usage", "permission", "exit", "5"]


@pytest.mark.parametrize("word", ["no-such-code", "77"])
def test_a_word_that_is_none(machine: Machine, word: str) -> None:
    result = machine.gpuckpt("explain", word)
    assert (result.code, result.error["code"], result.document["failures"]) == (2, "usage", [])
    assert word in result.error["message"]


def test_a_message_says_how_to_ask(machine: Machine) -> None:
    said = machine.gpuckpt("resume", 999_999_999, json=False).stderr.splitlines()[-1]
    assert said.strip() == "[no-such-process] more: gpuckpt explain no-such-process"

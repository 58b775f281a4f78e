"""stdout and stderr that cannot be written: what was done decides the exit status, and nothing is a traceback."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from gpuckpt.model import State
from tests.simulated_machine import COMMAND
from tests.test_cli_targets import no_pid

if TYPE_CHECKING:
    from tests.simulated_machine import Machine


def sh(machine: Machine, script: str, stdout: int = subprocess.PIPE, **environ: str) -> subprocess.CompletedProcess[str]:
    """*script* in a shell, where ``$0`` is gpuckpt."""
    done = subprocess.run(
        ["sh", "-c", script, COMMAND],
        env={**machine.environ, **environ},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize(
    ("words", "why"), [(">&-", "Bad file"), (">/dev/full", "No space"), ("--json >/dev/full", "No space"), ("", "Broken pipe")]
)
def test_what_was_done_decides_where_stdout_cannot_be_written(machine: Machine, words: str, why: str) -> None:
    target = machine.target()
    reader, pipe = os.pipe()
    os.close(reader)
    done = sh(machine, f'"$0" suspend {target.pid} {words}', pipe)
    os.close(pipe)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"gpuckpt: the output could not be written to stdout: {why}")
    assert target.state is State.CHECKPOINTED


@pytest.mark.parametrize("command", ["status", "recover", "explain", "completion bash", "--help", "ps --watch"])
def test_every_command_says_that_its_output_is_lost(machine: Machine, command: str) -> None:
    done = sh(machine, f'"$0" {command} >/dev/full')
    assert done.returncode == 0
    assert "could not be written to stdout: No space" in done.stderr


@pytest.mark.parametrize("err", ["2>&-", "2>/dev/full"])
def test_without_stderr(machine: Machine, err: str) -> None:
    target = machine.target()
    assert sh(machine, f'"$0" suspend {no_pid()} {err}').returncode == 4
    assert sh(machine, f'"$0" suspend --bogus {err}').returncode == 2
    assert sh(machine, f'"$0" suspend {target.pid} {err}').returncode == 0
    assert sh(machine, f'"$0" resume {target.pid} >&- {err}').returncode == 0
    assert target.unharmed()


def test_no_file_of_ours_becomes_a_standard_stream(machine: Machine) -> None:
    """The journal would be opened as descriptor 1, and the report printed into it."""
    target = machine.target()
    assert sh(machine, f'"$0" suspend {target.pid} <&- >&-').returncode == 0
    (record,) = machine.records()
    assert record["status"] == "suspended"


def test_an_encoding_that_lacks_a_sign(machine: Machine) -> None:
    target = machine.target()
    done = sh(machine, f'"$0" suspend {target.pid}', PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout[:10]) == (0, "suspended:")
    assert json.loads(sh(machine, '"$0" ps --json', PYTHONIOENCODING="latin-1").stdout)["ok"]

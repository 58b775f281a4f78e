"""`ps`, `status`, `is-suspended`, `doctor`, `completion`, help: what they show, and that every document has the same keys."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from gpuckpt.cli import demo
from gpuckpt.cli.main import COMMANDS, main
from gpuckpt.driver.api import DriverVersion
from gpuckpt.driver.simulated import SimulatedDevices
from gpuckpt.inspect import processes
from gpuckpt.model import GIB, Call, GpuBytes, State
from tests.simulated_machine import COMMAND, Result, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.simulated_machine import Machine

COMMON = {"schema", "command", "ok", "simulated", "processes", "seconds", "steps", "hazards", "warnings", "already", "error"}


def only(result: Any) -> dict[str, Any]:
    (row,) = result.document["processes"]
    found: dict[str, Any] = row
    return found


def test_an_empty_machine(machine: Machine) -> None:
    result = machine.gpuckpt("ps")
    assert (result.code, result.document["processes"]) == (0, [])
    (gpu,) = result.document["gpus"]
    assert (gpu["uuid"], gpu["total_bytes"], gpu["free_bytes"], gpu["lost"]) == (machine.uuids[0], 80 * GIB, 80 * GIB, False)
    for command in ("ps", "status"):
        assert "no process holds GPU memory, and none is suspended" in machine.gpuckpt(command, json=False).stdout
    recovered = machine.gpuckpt("recover")
    assert (recovered.code, recovered.document["already"], recovered.document["recovered"]) == (0, True, [])
    assert machine.gpuckpt("recover", json=False).stdout == "nothing was left in the middle\n"


def test_running_and_suspended(machine2: Machine) -> None:
    target = machine2.target("--gib", "4", "--gpu", "0", "--gpu", "1")
    row = only(machine2.gpuckpt("ps"))
    assert row["state"] == "running"
    assert "simtarget" in row["name"]
    assert {g["uuid"]: g["bytes"] for g in row["gpus"]} == dict.fromkeys(machine2.uuids, 4 * GIB)
    assert (row["host_bytes"], row["suspended_since"], row["by"]) == (0, None, "")
    assert machine2.gpuckpt("is-suspended", target.pid).code == 1

    before = time.time()
    machine2.gpuckpt("suspend", target.pid)
    for command in (("ps",), ("status",), ("status", target.pid)):
        row = only(machine2.gpuckpt(*command))
        assert (row["pid"], row["state"], row["gpus"], row["host_bytes"]) == (target.pid, "suspended", [], 8 * GIB)
        assert before <= row["suspended_since"] <= time.time()
        assert f"(uid {os.geteuid()})" in row["by"]
    answer = machine2.gpuckpt("is-suspended", target.pid)
    assert (answer.code, answer.document["suspended"]) == (0, True)
    silent = machine2.gpuckpt("is-suspended", target.pid, json=False)
    assert (silent.code, silent.stdout, silent.stderr) == (0, "", "")


def test_the_table(machine: Machine) -> None:
    one, two = machine.target("--gib", "4"), machine.target("--gib", "2")
    machine.gpuckpt("suspend", two.pid)
    lines = machine.gpuckpt("ps", json=False).stdout.splitlines()
    assert "4.0 GiB of 80.0 GiB used" in lines[0]
    assert "Simulated GPU" in lines[0]
    header, *rows = [re.split(r"\s{2,}", line.strip()) for line in lines[2:]]
    assert header[:6] == ["PID", "NAME", "USER", "STATE", "GPU MEMORY", "HOST"]
    by_pid = {int(r[0].split()[0]): " ".join(r) for r in rows}
    assert re.search(r"running 0: 4.0 GiB -", by_pid[one.pid])
    assert re.search(r"suspended - 2.0 GiB .* ago .*\(uid ", by_pid[two.pid])


def test_status_in_words(machine: Machine) -> None:
    target = machine.target("--gib", "4")
    assert machine.gpuckpt("status", json=False).stdout.startswith(f"running: pid {target.pid}")
    machine.gpuckpt("suspend", target.pid)
    words = machine.gpuckpt("status", target.pid, json=False).stdout
    assert words.startswith(f"suspended: pid {target.pid}")
    assert "4.0 GiB in host memory, since" in words


def test_locked_and_stopped(machine: Machine) -> None:
    locked, stopped = machine.target(), machine.target()
    with machine.world.transaction() as world:
        world.rules.lock(locked.pid)
    stopped.stop()
    begun = time.monotonic()
    rows = {p["pid"]: p for p in machine.gpuckpt("ps").document["processes"]}
    assert time.monotonic() - begun < 5
    assert rows[locked.pid]["state"] == "locked"
    assert "gpuckpt resume" in rows[locked.pid]["note"]
    assert rows[stopped.pid]["state"] == "stopped"
    assert machine.gpuckpt("is-suspended", stopped.pid).code == 1


def test_stopped_while_suspended(machine: Machine) -> None:
    target = machine.target("--gib", "2")
    machine.gpuckpt("suspend", target.pid)
    target.stop()
    row = only(machine.gpuckpt("status", target.pid))
    assert (row["state"], row["host_bytes"]) == ("suspended", 2 * GIB)
    assert "kill -CONT" in row["note"]
    assert machine.gpuckpt("is-suspended", target.pid).code == 0, "its GPU is free"


def test_an_operation_under_way_does_not_block_a_look(machine: Machine) -> None:
    target = machine.target("--gib", "2")
    machine.slow(1.5)
    for command, call, word in (("suspend", Call.CHECKPOINT, "suspending"), ("resume", Call.RESTORE, "resuming")):
        operation = machine.begin(command, target.pid)
        eventually(lambda call=call: target.under_way(call), str(call))
        looks = [machine.begin(*look) for look in (("status", target.pid), ("ps",), ("is-suspended", target.pid))]
        seen = [look.end() for look in looks]
        assert target.under_way(call), "they answered while it went on"
        assert [(only(r)["state"], only(r)["note"]) for r in seen] == [(word, "another gpuckpt is at work on it")] * 3
        assert [r.code for r in seen] == [0, 0, 1]
        assert operation.end().code == 0


def test_those_who_look_do_not_see_one_another(machine: Machine) -> None:
    target = machine.target()
    looks = [machine.begin("status", target.pid) for _ in range(8)]
    assert [only(look.end())["state"] for look in looks] == ["running"] * 8


def test_a_dead_member_is_named(machine: Machine) -> None:
    one, two = machine.target(), machine.target()
    machine.gpuckpt("suspend", one.pid, two.pid)
    two.kill()
    rows = {p["pid"]: p["state"] for p in machine.gpuckpt("ps").document["processes"]}
    assert rows == {one.pid: "suspended", two.pid: "gone"}
    assert machine.gpuckpt("is-suspended", one.pid).code == 0
    result = machine.gpuckpt("resume", two.pid)  # its number still stands for the group
    assert (result.code, result.states) == (0, {one.pid: "running", two.pid: "gone"})
    assert one.unharmed()


def test_who_asks_the_driver_for_us_is_not_asked_about(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """The helper, its callers and the process that asks NVML have the driver loaded, and are of one tree with a child of the command."""
    from gpuckpt.local import LocalWorld

    command = [sys.executable, "-m", "gpuckpt.driver.simtarget"]
    asked: list[int] = []
    with (
        LocalWorld(machine.environ) as world,
        subprocess.Popen(command, env=machine.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
        subprocess.Popen(["sleep", "60"]) as nvml,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        monkeypatch.setattr(world.devices, "helper", lambda: nvml.pid)
        monkeypatch.setattr(world.devices, "loaded", lambda pids: asked.extend(pids) or {child.pid})
        proc = processes.read(child.pid)
        assert proc is not None
        lock = world.start(Call.LOCK, proc.id, timeout_s=10.0)
        world.wait([lock], world.now() + 10)  # its caller stands by
        ours = {os.getpid(), nvml.pid, world.callers.helper(), lock.caller_pid}
        try:
            (member,) = world.inspect([child.pid], tree=True).processes
        finally:
            lock.release()
            child.kill()
            nvml.kill()
    assert (member.pid, member.state) == (child.pid, State.LOCKED)
    assert child.pid in asked
    assert not ours & set(asked)


def test_foreign_pids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Machine) -> None:
    """NVML knows pids of other containers: shown as such, also where a process here has the same number."""
    from gpuckpt.local import LocalWorld
    from gpuckpt.overview import overview

    target = machine.target("--gib", "1")
    with LocalWorld(machine.environ) as world:
        real = world.devices.processes()
        listed = {**real, 4194303: {machine.uuids[0]: 3 * GIB}, 1: {machine.uuids[0]: None}}
        monkeypatch.setattr(world.devices, "processes", lambda: listed)
        rows = {r.pid: r for r in overview(world).rows}
        assert rows[target.pid].state == "running"
        for pid, nbytes in ((4194303, 3 * GIB), (1, None)):
            assert (rows[pid].state, rows[pid].user) == ("foreign", "?")
            assert rows[pid].gpus == (GpuBytes(machine.uuids[0], nbytes),)
            assert "not visible from here" in rows[pid].name
        assert [r.pid for r in overview(world, [target.pid]).rows] == [target.pid]


def test_a_lost_gpu_breaks_no_table(machine2: Machine) -> None:
    machine2.gpu(1, lost=True)
    result = machine2.gpuckpt("ps")
    assert [g["lost"] for g in result.document["gpus"]] == [False, True]
    assert "lost: it fell off the bus" in machine2.gpuckpt("ps", json=False).stdout
    assert machine2.gpuckpt("status").code == 0
    assert machine2.gpuckpt("doctor").document["checks"]


@pytest.mark.parametrize("no_colour", [False, True])
def test_colour_on_a_terminal_only_and_not_where_unwanted(machine: Machine, no_colour: bool) -> None:
    machine.target()
    ours, theirs = pty.openpty()
    environ = {**machine.environ, "TERM": "xterm-256color", "COLUMNS": "200", **({"NO_COLOR": "1"} if no_colour else {})}
    subprocess.run([COMMAND, "ps"], stdin=theirs, stdout=theirs, stderr=theirs, env=environ, check=True)
    os.close(theirs)
    seen = os.read(ours, 65536).decode()
    os.close(ours)
    assert "running" in seen
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", seen)) is not no_colour
    assert "\x1b" not in machine.gpuckpt("ps", json=False).stdout


def test_watch_ends_with_ctrl_c(machine: Machine) -> None:
    target = machine.target()
    watch = subprocess.Popen([COMMAND, "ps", "--watch", "--interval", "50ms"], env=machine.environ, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    seen = ""
    while str(target.pid) not in seen:
        seen += watch.stdout.readline() or pytest.fail("it ended")
    watch.send_signal(2)
    watch.communicate(timeout=20)
    assert watch.returncode == 130


def test_no_driver(machine: Machine) -> None:
    target = machine.target()
    with machine.world.transaction() as world:
        world.rules.driver = None
    for command in (("ps",), ("status",), ("suspend", target.pid), ("resume", target.pid), ("is-suspended", target.pid)):
        result = machine.gpuckpt(*command)
        assert (result.code, result.error["code"]) == (6, "no-driver"), command
        assert "no NVIDIA driver" in result.error["message"]
    assert machine.gpuckpt("recover").code == 0
    doctor = machine.gpuckpt("doctor")
    assert doctor.code == 6
    assert doctor.document["checks"][0]["status"] == "problem"


def test_a_driver_that_is_too_old(machine: Machine) -> None:
    target = machine.target()
    with machine.world.transaction() as world:
        world.rules.driver = DriverVersion((12, 4), "550.54.15")
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"]) == (6, "driver-too-old")
    for word in ("550.54.15", "CUDA 12.4", "12.8"):
        assert word in result.error["message"]
    assert "570" in result.error["hint"]
    assert target.state is State.RUNNING
    assert machine.gpuckpt("resume", target.pid).error["code"] == "driver-too-old"
    assert "570" in str(machine.gpuckpt("doctor").document["checks"][0])


def test_doctor_on_a_simulated_machine(machine: Machine) -> None:
    result = machine.gpuckpt("doctor")
    assert result.document["simulated"] is True
    assert {"NVIDIA driver", "GPUs", "host memory", "permission"} <= {c["name"] for c in result.document["checks"]}
    assert result.code == (0 if result.document["ok"] else 6)
    assert machine.gpuckpt("doctor", json=False).stdout.startswith("GPUs are simulated")


@pytest.mark.parametrize("arguments", [("demo", "--simulate"), ("demo", "--gib", "0.5")])
def test_demo(machine: Machine, arguments: tuple[str, ...]) -> None:
    result = machine.gpuckpt(*arguments)
    assert result.code == 0
    document = result.document
    assert (document["simulated"], document["same_answer"], document["gpu_bytes"]["suspended"]) == (True, True, 0)
    assert document["gpu_bytes"]["running"] == document["gpu_bytes"]["resumed"] > 0
    assert machine.gpuckpt("ps").document["processes"] == []


@pytest.mark.parametrize("others", [{}, {4194303: {"GPU-x": 3 * GIB}}])
def test_demo_where_nvml_lists_no_process_of_ours(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, others: dict[int, dict[str, int]]
) -> None:
    """As in a container: then it is the card that shows what left."""
    for name, value in machine.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(SimulatedDevices, "processes", lambda _: others)
    said: list[str] = []
    seen = demo.play(False, 1.0, None, said.append).details
    assert seen["gpu_bytes"] == {"running": GIB, "suspended": 0, "resumed": GIB}
    assert seen["same_answer"]
    assert said[-1] == "the same as before: it never noticed"


def test_demo_in_words(machine: Machine) -> None:
    seen = machine.gpuckpt("demo", json=False, GPUCKPT_SIMULATE="").stdout
    assert "on simulated GPUs, everything else is real" in seen
    assert "holds 0 on the GPU" in seen
    assert "the same as before: it never noticed" in seen


def test_documents_have_the_same_keys_on_success_and_failure(machine: Machine) -> None:
    target = machine.target()
    good = [
        machine.gpuckpt("ps"),
        machine.gpuckpt("suspend", "--dry-run", target.pid),
        machine.gpuckpt("suspend", target.pid),
        machine.gpuckpt("status", target.pid),
        machine.gpuckpt("is-suspended", target.pid),
        machine.gpuckpt("resume", target.pid),
        machine.gpuckpt("recover"),
        machine.gpuckpt("doctor"),
        machine.gpuckpt("demo"),
    ]
    keys = {r.document["command"]: set(r.document) for r in good}
    with machine.world.transaction() as world:
        world.rules.driver = None
    for command, expected in keys.items():
        arguments = (target.pid,) if command in ("suspend", "resume", "status", "is-suspended") else ()
        bad = [machine.gpuckpt(command, "--no-such-option")]
        if command not in ("recover", "doctor"):
            bad.append(machine.gpuckpt(command, *arguments))
        for result in bad:
            assert set(result.document) == expected >= COMMON
            assert result.document["ok"] is False
            assert set(result.error) == {"code", "message", "hint", "pid", "gpu", "step"}
            assert result.document["command"] == command


def here(*arguments: str) -> Result:
    """A command line that asks for help, without a process of its own."""
    result = CliRunner().invoke(main, arguments, prog_name="gpuckpt")
    return Result(result.exit_code, result.stdout, result.stderr)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_examples(command: str, option: str) -> None:
    result = here(command, option)
    assert result.code == 0
    assert "Examples:" in result.stdout
    assert f"gpuckpt {command}" in result.stdout


def test_help_names_all_commands(machine: Machine) -> None:
    shown = machine.gpuckpt("--help", json=False)
    assert shown.code == 0
    assert "Examples:" in shown.stdout
    assert "Examples:" in here("-h").stdout
    for command in COMMANDS:
        assert f"  {command} " in shown.stdout


@pytest.mark.parametrize(
    ("command", "word"), [("resume", "0"), *(("suspend", w) for w in ("0", "x", "-1", "", "5 parsecs", "nan", "inf", "0ms"))]
)
def test_bad_durations(machine: Machine, command: str, word: str) -> None:
    result = machine.gpuckpt(command, "4242", f"--timeout={word}")
    assert (result.code, result.error["code"]) == (2, "usage")
    assert "duration" in result.error["message"]


def test_bad_usage_in_words(machine: Machine) -> None:
    for arguments in (("suspend",), ("frobnicate",), ("suspend", "1", "--bogus"), ("resume", "1", "--wait", "0"), ("is-suspended",)):
        result = machine.gpuckpt(*arguments, json=False)
        assert result.code == 2
        assert "Error: " in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(machine: Machine, shell: str) -> None:
    script = machine.gpuckpt("completion", shell, json=False)
    assert script.code == 0
    assert "_GPUCKPT_COMPLETE" in script.stdout
    offered = machine.gpuckpt(
        json=False, _GPUCKPT_COMPLETE=f"{shell}_complete", COMP_WORDS="gpuckpt s", COMP_CWORD="s" if shell == "fish" else "1"
    ).stdout
    assert {"suspend", "status"} <= set(re.findall(r"[\w-]+", offered))


def test_version(machine: Machine) -> None:
    assert re.fullmatch(r"gpuckpt, version \d+\.\d+\.\d+\S*\n", machine.gpuckpt("--version", json=False).stdout)


def test_a_closed_pipe_is_no_traceback(machine: Machine) -> None:
    done = subprocess.run(["sh", "-c", '"$0" ps --json | true'], env=machine.environ, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("ps",), ("status",), ("resume", str(os.getpid()))])
def test_a_simulated_machine_that_is_none(machine: Machine, command: tuple[str, ...], tmp_path: Path) -> None:
    result = machine.gpuckpt(*command, GPUCKPT_SIMULATE=str(tmp_path / "none"))
    assert (result.code, result.error["code"]) == (2, "usage")
    assert f"GPUCKPT_SIMULATE={tmp_path / 'none'}" in result.error["message"]

"""What a TARGET may be, what belongs to it, and what is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt import early
from gpuckpt.cli import entry
from gpuckpt.driver.patient import ANSWER_S
from gpuckpt.inspect.processes import table
from gpuckpt.model import State
from tests.simulated_machine import COMMAND, SIMTARGET, eventually

if TYPE_CHECKING:
    from tests.simulated_machine import Machine

#: A process with a thread of its own; prints the thread's id.
THREADED = """
import sys, threading
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
print(thread.native_id, flush=True)
sys.stdin.read()
done.set()
"""


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[str]]:
    """A process that has nothing to do with CUDA."""
    with subprocess.Popen([sys.executable, "-c", THREADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.communicate()


def no_pid() -> int:
    """A pid that no process has."""
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    return next(pid for pid in range(limit - 1, 1, -1) if not Path(f"/proc/{pid}").exists())


def kernel_thread() -> int:
    return next((pid for pid, proc in sorted(table().items()) if proc.kernel), 0)


@pytest.mark.parametrize("command", ["suspend", "resume", "status", "is-suspended"])
def test_no_such_process(machine: Machine, command: str) -> None:
    pid = no_pid()
    result = machine.gpuckpt(command, pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (4, "no-such-process", pid)
    assert str(pid) in result.error["message"]
    assert "gpuckpt ps" in result.error["hint"]


@pytest.mark.parametrize("command", ["suspend", "status"])
@pytest.mark.parametrize("word", ["abc", "0", "1.5", "٣", "", "+3"])
def test_no_pid_at_all(machine: Machine, command: str, word: str) -> None:
    result = machine.gpuckpt(command, word)
    assert (result.code, result.error["code"]) == (2, "usage")
    assert repr(word) in result.error["message"]


def test_a_negative_pid(machine: Machine) -> None:
    assert machine.gpuckpt("suspend", "-1").code == 2
    result = machine.gpuckpt("suspend", "--json", "--", "-1", json=False)
    assert (result.code, result.error["code"]) == (2, "usage")


@pytest.mark.parametrize("command", ["suspend", "resume", "status", "is-suspended"])
def test_a_thread_names_its_process(machine: Machine, idle: subprocess.Popen[str], command: str) -> None:
    assert idle.stdout is not None
    thread = int(idle.stdout.readline())
    result = machine.gpuckpt(command, thread)
    assert (result.code, result.error["code"]) == (2, "not-a-process")
    assert f"thread of pid {idle.pid}" in result.error["message"]
    assert result.error["hint"] == f"gpuckpt {command} {idle.pid}"


@pytest.mark.skipif(not kernel_thread(), reason="no kernel threads can be seen here")
def test_a_kernel_thread(machine: Machine) -> None:
    result = machine.gpuckpt("suspend", kernel_thread())
    assert (result.code, result.error["code"]) == (2, "not-a-process")
    assert "kernel thread" in result.error["message"]


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


def rooms() -> bool:
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


def in_a_room(machine: Machine, script: str) -> list[dict[str, Any]]:
    """The documents of the commands in *script*, run by the first process of a pid namespace as a container has it."""
    prelude = f'gpuckpt() {{ "{COMMAND}" "$@" --json; echo; }}\n'
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", prelude + script], env=machine.environ, capture_output=True, text=True, check=False, timeout=60
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"schema"')]


@pytest.mark.skipif(not rooms(), reason="no user namespaces here")
def test_in_a_pid_namespace_pid_2_and_process_group_0_are_like_any_other(machine: Machine) -> None:
    for name in ("in", "out"):
        os.mkfifo(machine.path / name)
    script = f"""
    {" ".join(SIMTARGET)} --spawn 1 < {machine.path}/in > {machine.path}/out &
    exec 3> {machine.path}/in; read ready < {machine.path}/out
    gpuckpt suspend $!; gpuckpt suspend $! --accept-loss possible-import; gpuckpt is-suspended $!; gpuckpt resume $!
    exec 3>&-
    """
    refused, down, asked, up = in_a_room(machine, script)
    assert refused["error"]["code"] == "possible-import"
    assert down["error"] is asked["error"] is up["error"] is None
    assert [p["pid"] for p in down["processes"]] == [2, 3]


@pytest.mark.skipif(not rooms(), reason="no user namespaces here")
def test_a_first_program_of_a_container_that_holds_the_gpu_belongs_to_its_children(machine: Machine) -> None:
    words = [*NAMESPACE, "--kill-child", *SIMTARGET, "--spawn", "1"]
    with subprocess.Popen(words, env=machine.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdin is not None
        assert container.stdout is not None
        ready = json.loads(container.stdout.readline())
        (outside,) = (proc.pid for proc in table().values() if proc.ppid == container.pid)
        enter = ("nsenter", "-t", str(outside), "--user", "--preserve-credentials", "--pid", "--mount")
        assert ready["pid"] == 1
        for pid, words_ in ((1, "init"), (ready["children"][0], "pid 1 (python")):
            result = machine.begin("suspend", pid, prefix=enter).end()
            assert (result.code, result.error["code"], result.error["pid"]) == (2, "protected-process", 1)
            assert words_ in result.error["message"]
        assert machine.begin("suspend", "--no-tree", ready["children"][0], prefix=enter).end().error["code"] == "possible-import"
        container.stdin.write("check\n")
        container.stdin.flush()
        assert json.loads(container.stdout.readline())["sum"] == ready["sum"]
        container.stdin.close()


def test_init_and_ancestors_are_never_suspended(machine: Machine) -> None:
    for pid, words in ((1, "init"), (os.getpid(), "started this gpuckpt")):
        result = machine.gpuckpt("suspend", pid)
        assert (result.code, result.error["code"]) == (2, "protected-process")
        assert words in result.error["message"]
    # its own pid: the shell passes it on to gpuckpt by exec
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" suspend $$ --json', COMMAND], env=machine.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "gpuckpt itself" in done.stdout


@pytest.mark.parametrize("command", ["suspend", "resume", "status", "is-suspended"])
def test_a_process_without_cuda(machine: Machine, idle: subprocess.Popen[str], command: str) -> None:
    result = machine.gpuckpt(command, idle.pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (4, "no-cuda-state", idle.pid)


def test_one_that_only_loaded_the_driver(machine: Machine) -> None:
    alone = machine.target("--trait", "contextless")
    result = machine.gpuckpt("suspend", alone.pid)
    assert (result.code, result.error["code"]) == (4, "no-cuda-state")
    assert machine.gpuckpt("ps").document["processes"] == []


def test_one_that_only_loaded_the_driver_is_left_alone_in_a_group(machine: Machine) -> None:
    server, engine = machine.job(("--trait", "contextless"), ("--gib", "2"))
    for target in (server, engine):  # either stands for the group
        assert machine.gpuckpt("suspend", target.pid).states == {engine.pid: "suspended"}
        assert server.state is State.RUNNING
        assert server.unharmed()
        assert machine.gpuckpt("resume", target.pid).states == {engine.pid: "running"}
    assert engine.unharmed()


def test_forked_children_without_a_context_do_not_block(machine: Machine) -> None:
    trainer = machine.target("--fork", "4")
    result = machine.gpuckpt("suspend", trainer.forked[0])  # a data loader stands for its trainer
    assert result.states == {trainer.pid: "suspended"}
    assert machine.gpuckpt("resume", trainer.pid).code == 0
    assert trainer.unharmed()


def test_several_cuda_processes_are_a_possible_import(machine: Machine) -> None:
    parent = machine.target("--spawn", "2")
    result = machine.gpuckpt("suspend", parent.pid)
    assert (result.code, result.error["code"]) == (6, "possible-import")
    assert result.error["message"].startswith('start it with agents (eval "$(gpuckpt env)", or a server by gpuckpt run;')
    assert f"gpuckpt suspend {result.error['pid']} --accept-loss possible-import" in result.error["hint"], "it can be typed"
    for child in parent.children:
        assert str(child) in result.error["message"]
    assert parent.unharmed()
    assert machine.records() == []


def test_a_tree_goes_as_one_when_accepted(machine: Machine) -> None:
    parent = machine.target("--spawn", "2")
    result = machine.gpuckpt("suspend", parent.children[1], "--accept-loss", "possible-import")
    assert result.states == dict.fromkeys([parent.pid, *parent.children], "suspended")
    assert machine.used() == 0
    assert len(machine.records()) == 1
    result = machine.gpuckpt("resume", parent.children[0])  # the journal knows the group
    assert result.states == dict.fromkeys([parent.pid, *parent.children], "running")
    assert parent.unharmed()


def test_no_tree_has_the_same_hazards(machine: Machine) -> None:
    parent = machine.target("--spawn", "1")
    result = machine.gpuckpt("suspend", "--no-tree", parent.pid)
    assert (result.code, result.error["code"]) == (6, "possible-import")
    assert f"name {parent.children[0]} too" in result.error["hint"]
    result = machine.gpuckpt("suspend", "--no-tree", parent.pid, "--accept-loss", "possible-import")
    assert result.states == {parent.pid: "suspended"}
    assert machine.world.peek().rules.state(parent.children[0]) is State.RUNNING
    assert machine.gpuckpt("resume", parent.pid).states == {parent.pid: "running"}


def test_a_session_is_a_group(machine: Machine) -> None:
    one, two = machine.job((), ())
    result = machine.gpuckpt("suspend", one.pid)
    assert (result.code, result.error["code"]) == (6, "possible-import")
    assert f"{two.pid} (same session)" in result.error["message"]
    result = machine.gpuckpt("suspend", two.pid, "--accept-loss", "possible-import")
    assert set(result.states) == {one.pid, two.pid}


def test_a_cgroup_is_a_group(machine: Machine) -> None:
    one, two, three = (machine.target() for _ in range(3))
    for target, path in ((one, "/pod/a"), (two, "/pod/a"), (three, "/user.slice/session-3.scope")):
        machine.lay({f"proc/{target.pid}/cgroup": f"0::{path}\n"})
    result = machine.gpuckpt("suspend", one.pid)
    assert (result.code, result.error["code"]) == (6, "possible-import")
    assert f"{two.pid} (same cgroup)" in result.error["message"]
    assert str(three.pid) not in result.error["message"]


def test_several_targets_are_one_operation(machine: Machine) -> None:
    targets = [machine.target() for _ in range(3)]
    pids = [t.pid for t in targets]
    assert machine.gpuckpt("suspend", *pids, pids[0]).states == dict.fromkeys(pids, "suspended")
    assert len(machine.records()) == 1
    assert machine.gpuckpt("resume", pids[1]).states == dict.fromkeys(pids, "running")
    assert all(t.unharmed() for t in targets)
    assert machine.records() == []


def test_one_bad_target_stops_all(machine: Machine, idle: subprocess.Popen[str]) -> None:
    good = machine.target()
    for bad, code in ((str(no_pid()), 4), ("1", 2), ("x", 2)):
        assert machine.gpuckpt("suspend", good.pid, bad).code == code
        assert machine.gpuckpt("suspend", bad, good.pid).code == code
    assert good.state is State.RUNNING
    assert machine.records() == []


def test_groups_suspended_apart_can_be_resumed_together(machine: Machine) -> None:
    one, two = machine.target(), machine.target()
    for target in (one, two):
        assert machine.gpuckpt("suspend", target.pid).code == 0
    assert len(machine.records()) == 2
    dry = machine.gpuckpt("resume", "--dry-run", one.pid, two.pid)
    assert set(dry.states) == {one.pid, two.pid}
    assert len(machine.records()) == 2, "a dry run touches nothing"
    assert machine.gpuckpt("resume", one.pid, two.pid).states == {one.pid: "running", two.pid: "running"}
    assert machine.records() == []


def test_a_child_of_the_same_shell_that_runs_gpuckpt(machine: Machine) -> None:
    """gpuckpt's own relatives are suspended with the target, gpuckpt and its ancestors never."""
    target = subprocess.Popen(
        [sys.executable, "-m", "gpuckpt.driver.simtarget"], env=machine.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with target:
        assert target.stdout is not None
        assert target.stdout.readline()
        assert machine.gpuckpt("suspend", target.pid).states == {target.pid: "suspended"}
        assert machine.gpuckpt("resume", target.pid).code == 0
        target.communicate("quit\n")
    eventually(lambda: target.pid not in machine.world.peek().rules.processes, "the target ends")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("suspend 4242 --json", True),
        ("resume --wait 1m 4242", True),
        ("ps", True),
        ("status --json", True),
        ("suspend my-run", False),
        ("status my-run", False),
        ("suspend 4242 --help", False),
        ("run -- sleep 5", False),
        ("", False),
    ],
)
def test_what_is_begun_before_the_command_line_is_read(words: str, wanted: bool) -> None:
    assert entry.asks(words.split()) is wanted


def test_what_was_begun_ahead_is_for_the_first_who_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUCKPT_SIMULATE", str(tmp_path))
    early.ahead()
    one, two = early.begin(timeout_s=3), early.begin()
    assert one.callers is not two.callers
    assert (one.devices.within_s, two.devices.within_s) == (3, ANSWER_S)
    for start in (one, two):
        start.callers.close()

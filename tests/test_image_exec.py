"""`gpuckpt exec`: a program is started with the preload library, and is otherwise as it would have been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.image import paths, preload
from tests.machines import Machine
from tests.simulated_machine import COMMAND

SAYS = "gpuckpt exec: preload library"


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, "exec", *words], capture_output=True, text=True, env={**os.environ, **environ}, timeout=60, check=False)


def test_the_command_takes_our_place_with_the_library_first() -> None:
    with subprocess.Popen(
        [COMMAND, "exec", "--", "cat", "/proc/self/environ", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LD_PRELOAD": ""},
    ) as process:
        assert process.stdout is not None
        environ = process.stdout.read1()
        assert f"LD_PRELOAD={preload.library()}\0".encode() in environ
        assert Path(f"/proc/{process.pid}/comm").read_text() == "cat\n"
        assert preload.loaded(process.pid)
        _, said = process.communicate()
    assert said.decode() == f"{SAYS} on\n"


@pytest.mark.parametrize("words", [("sh", "-c", "exit 7"), ("--", "sh", "-c", "exit 7")])
def test_the_status_is_the_commands(words: tuple[str, ...]) -> None:
    assert run(*words).returncode == 7


def test_options_after_the_command_are_the_commands() -> None:
    assert run("echo", "--json", "--help", "-h", "--", "-x").stdout == "--json --help -h -- -x\n"


def test_a_signal_ends_it_as_it_would() -> None:
    assert run("sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_signals_are_as_they_were() -> None:
    script = "import signal; print([signal.getsignal(s) for s in (signal.SIGXFSZ, signal.SIGINT)])"
    ignored = ["sed", "-n", "s/^SigIgn://p", "/proc/self/status"]
    libc = 3 << 31  # signals 32 and 33, which glibc's posix_spawn (subprocess of Python 3.13) leaves ignored
    assert int(run(*ignored).stdout, 16) & ~libc == int(subprocess.check_output(ignored), 16) & ~libc
    assert run(sys.executable, "-c", script).stdout == subprocess.check_output([sys.executable, "-c", script], text=True)


def test_it_says_why_not_and_runs_all_the_same() -> None:
    ran = run("echo", "runs", GPUCKPT_PRELOAD="0")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "runs\n", f"{SAYS} off: GPUCKPT_PRELOAD=0\n")


def test_other_preloads_are_kept() -> None:
    ran = run("sh", "-c", "echo $LD_PRELOAD", LD_PRELOAD="/nowhere/other.so")
    assert ran.stdout.rstrip().endswith(":/nowhere/other.so")


def test_its_own_failures(tmp_path: Path) -> None:
    text, script = tmp_path / "text", tmp_path / "script"
    text.write_text("no program")
    script.write_text("#!/nowhere/sh\n")
    script.chmod(0o755)
    for words, code, said in (
        (("nowhere-to-be-found",), 127, "not found"),
        ((str(tmp_path / "none"),), 127, "not found"),
        ((str(text),), 126, "Permission denied"),
        ((str(tmp_path),), 126, "Permission denied"),
        ((str(script),), 126, "interpreter"),
        ((), 125, "COMMAND"),
        (("--no-such-option", "true"), 125, "--no-such-option"),
    ):
        ran = run(*words)
        assert (ran.returncode, ran.stdout) == (code, ""), words
        assert said in ran.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_doctor_tells_which_cuda_processes_have_it(machine: Machine) -> None:
    assert machine.line("preload library").message.startswith("loaded in no CUDA process")
    ours = f"7f0000000000-7f0000001000 r-xp 00000000 08:01 7 {preload.library()}\n"
    machine.process(11, 1, "trainer", maps=ours)
    machine.process(12, 1, "server", maps="7f0000000000-7f0000001000 r-xp 00000000 08:01 7 /usr/lib/libcuda.so.1\n")
    line = machine.line("preload library")
    assert (line.status, line.fix) == ("ok", "")
    assert "loaded in 11 (trainer), not in 1 other;" in line.message
    few, many = (f"{1 / ratio:.1f}" for ratio in sorted(paths.RATIOS, reverse=True))
    said = f"without it takes about {few}-{many} times as long on 16 CPUs (estimate, by {paths.SOURCES[0]})"
    assert said in line.message


def test_the_doctor_tells_where_it_was_asked_for_and_did_not_load(machine: Machine) -> None:
    """Case 54"""
    cuda = "7f0000000000-7f0000001000 r-xp 00000000 08:01 7 /usr/lib/libcuda.so.1\n"
    machine.process(11, 1, "trainer", maps=cuda, environ=f"A=1\0LD_PRELOAD={preload.library()}\0")
    machine.process(12, 1, "server", maps=cuda, environ="LD_PRELOAD=/other.so\0")
    line = machine.line("preload library")
    assert line.status == "warning"
    assert "asked for and not loaded in 11 (trainer): suspends there take the driver's own path" in line.message
    assert str(preload.library()) in line.fix


def test_the_doctor_tells_of_a_kernel_that_is_too_old(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "populates", lambda: False)
    line = machine.line("preload library")
    assert (line.status, "on disk" in line.message, line.fix) == ("warning", True, "Linux 5.14 or newer")


def test_the_doctor_tells_that_it_is_missing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "library", lambda: None)
    line = machine.line("preload library")
    assert (line.status, "C compiler" in line.message, "gcc" in line.fix) == ("warning", True, True)
    monkeypatch.setenv("GPUCKPT_PRELOAD", "0")
    assert machine.line("preload library").fix == "unset GPUCKPT_PRELOAD"

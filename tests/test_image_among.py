"""The preload library among others: other preloads, other C libraries, programs that cannot load it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from gpuckpt.image import preload
from tests.image_machine import Program, Start, is_image, is_plain


def test_it_calls_no_malloc_and_bears_calls_before_its_own_start(start_program: Start, image_folder: Path) -> None:
    program = start_program(LD_PRELOAD=str(image_folder / "malloc.so"))
    program.announce()
    found = program.map()
    assert is_image(found)
    assert found.mallocs == 0


def test_other_preloads_are_kept_and_see_every_mapping(start_program: Start, image_folder: Path) -> None:
    program = start_program(LD_PRELOAD=f"{image_folder}/mmap.so {image_folder}/nowhere.so")
    program.announce()
    assert is_image(program.map())
    assert is_plain(program.map("thread"))
    seen = program.end()
    assert seen.count("interposed") == 2
    assert "nowhere.so" in seen, "the loader says so, as it did before"


def test_an_interposer_before_ours_hides_the_caller(image_folder: Path, start_program: Start) -> None:
    """It calls the kernel itself: nothing is altered, and nothing goes wrong."""
    ours = preload.environment()["LD_PRELOAD"]
    program = Program(image_folder, {**os.environ, "LD_PRELOAD": f"{image_folder}/mmap.so:{ours}"})
    program.announce()
    assert is_plain(program.map())
    assert program.result.seen == 0
    program.end()


def test_where_the_library_cannot_be_seen_only_the_loader_says_so(tmp_path: Path) -> None:
    """Case 54: Project-HAMi/HAMi#777. A child in a mount namespace or a chroot without it."""
    ours = preload.library()
    assert ours is not None
    hidden = tmp_path / "gone" / ours.name
    ran = subprocess.run(["/bin/echo", "runs"], env={"LD_PRELOAD": str(hidden)}, capture_output=True, text=True, check=True)
    assert ran.stdout == "runs\n"
    assert len(ran.stderr.splitlines()) == 1
    assert "ld.so" in ran.stderr
    if os.geteuid() != 0:
        return
    script = f"mount -t tmpfs none {ours.parent} && /bin/echo runs"
    ran = subprocess.run(["unshare", "-m", "sh", "-c", script], env=preload.environment(), capture_output=True, text=True, check=True)
    assert ran.stdout == "runs\n"
    assert all("ld.so" in line for line in ran.stderr.splitlines())


def test_beside_a_library_that_the_machine_preloads(start_program: Start, image_folder: Path, tmp_path: Path) -> None:
    """Case 54. By /etc/ld.so.preload, which the loader takes after LD_PRELOAD."""
    if os.geteuid() != 0:
        pytest.skip("only root can lay one out")
    script = tmp_path / "with-preload"
    upper, work = tmp_path / "tmpfs/upper", tmp_path / "tmpfs/work"
    upper.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\nset -e\nmount -t tmpfs none {upper.parent}\nmkdir {upper} {work}\n"
        f"echo {image_folder}/mmap.so > {upper}/ld.so.preload\n"
        f'mount -t overlay none -o lowerdir=/etc,upperdir={upper},workdir={work} /etc\nexec "$@"\n'
    )
    script.chmod(0o755)
    if subprocess.run(["unshare", "-m", script, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no overlay can be mounted here")
    program = start_program(("unshare", "-m", str(script)))
    program.announce()
    assert is_image(program.map())
    assert program.end().count("interposed") == 1


def test_it_needs_no_newer_c_library_than_the_oldest_in_use() -> None:
    """A container that inherits LD_PRELOAD and sees the file would end at its start."""
    text = subprocess.run(["readelf", "-V", str(preload.library())], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", text)}
    assert versions
    assert max(versions) <= (2, 17)


def test_a_setuid_program_does_not_load_it(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    program = tmp_path / "setuid"
    program.write_bytes(Path("/bin/cat").read_bytes())
    program.chmod(0o4755)
    tmp_path.chmod(0o755)
    command = ["setpriv", "--reuid=65534", "--clear-groups", str(program), "/proc/self/maps"]
    ran = subprocess.run(command, env=preload.environment(), capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"cannot be run here: {ran.stderr}")
    assert preload.NAME not in ran.stdout
    assert ran.stderr == ""


def test_a_program_with_address_sanitizer_starts(tmp_path: Path) -> None:
    """Its runtime wants to be the first library, and ends the program where another is."""
    source = tmp_path / "program.c"
    source.write_text("int main(int n, char **v) { (void)v; int a[2] = {0, 1}; return a[n]; }\n")
    built = subprocess.run(["gcc", "-fsanitize=address", "-o", tmp_path / "program", source], check=False, capture_output=True)
    if built.returncode:
        pytest.skip("no AddressSanitizer here")
    ran = subprocess.run([tmp_path / "program"], env=preload.environment(), capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, "")
    ran = subprocess.run([tmp_path / "program", "more"], env=preload.environment(), capture_output=True, text=True, check=False)
    assert "stack-buffer-overflow" in ran.stderr, "and it does what it is for"


def test_a_static_program_runs_without_it(tmp_path: Path) -> None:
    source = tmp_path / "static.c"
    source.write_text('#include <stdio.h>\nint main(void) { puts("runs"); return 0; }\n')
    if subprocess.run(["gcc", "-static", "-o", tmp_path / "static", source], capture_output=True, check=False).returncode != 0:
        pytest.skip("no static C library here")
    assert subprocess.check_output([tmp_path / "static"], env=preload.environment()) == b"runs\n"

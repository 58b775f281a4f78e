"""What a wheel of this tree has in it, and what not."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"ckpt": "gpuckpt", "cli": "gpuckpt/cli", "nccl": "gpuckpt/nccl"}
PACKAGES = {
    "gpuckpt",
    "gpuckpt/agent",
    "gpuckpt/cli",
    "gpuckpt/doctor",
    "gpuckpt/driver",
    "gpuckpt/image",
    "gpuckpt/inspect",
    "gpuckpt/nccl",
    "gpuckpt/pool",
    "gpuckpt/rendezvous",
    "gpuckpt/supervisor",
}
LIBRARIES = {"gpuckpt/image/libgpuckpt_preload.abi3.so", "gpuckpt/pool/libgpuckpt_pool.abi3.so"}
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has of this tree: building beside a build/ of old, or in the tree itself, would tell of other things."""
    copy = tmp_path_factory.mktemp("wheel") / "tree"
    for part in ("ckpt", "cli", "nccl", "tests", "benchmarks", "docs", ".ci"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in (ROOT / "pyproject.toml", ROOT / "MANIFEST.in", ROOT / "LICENSE", *ROOT.glob("*.md")):
        shutil.copy(path, copy / path.name)
    return copy


@pytest.fixture(scope="module")
def unpacked(tree: Path) -> Path:
    """The source distribution of that tree: all of it, so that its tests run and its links resolve."""
    there = _files(tree)
    with tarfile.open(_build("sdist", tree)) as archive:
        archive.extractall(tree.parent / "unpacked", filter="data")
    (found,) = (tree.parent / "unpacked").iterdir()
    assert there - _files(found) == set()
    return found


@pytest.fixture(scope="module")
def built(unpacked: Path) -> Path:
    """The wheel of that source distribution."""
    return _build("wheel", unpacked)


def test_the_libraries_ask_for_no_newer_libc_than_wheels_are_built_for(built: Path, tmp_path: Path) -> None:
    """With 2.17 a function of later would not compile, and a wheel would be without that library."""
    with zipfile.ZipFile(built) as wheel:
        for name in LIBRARIES:
            library = wheel.extract(name, tmp_path)
            symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
            asked = re.findall(r"(\w+)@+GLIBC_2\.(\d+)", symbols)
            assert asked
            # Those that came from libpthread and libdl to libc have the version of that move, and were there before.
            assert not [name for name, minor in asked if int(minor) > 17 and not name.startswith(("pthread_", "dl"))], name


def test_a_wheel_of_the_sdist_has_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(built) as wheel:
        names = {n for n in wheel.namelist() if not n.endswith("/")}
        text = {n.rpartition("/")[2]: wheel.read(n).decode() for n in names if ".dist-info/" in n}
    metadata = next(n.split("/")[0] for n in names if n.endswith(".dist-info/METADATA"))
    package = {n for n in names if not n.startswith(f"{metadata}/")}
    assert package == {"gpuckpt/py.typed", "gpuckpt/failures.md", *LIBRARIES, *_modules()}
    assert {n.rpartition("/")[0] for n in package} == PACKAGES
    rest = {n.removeprefix(f"{metadata}/") for n in names - package}
    assert rest == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    assert "gpuckpt = gpuckpt.cli.entry:main" in text["entry_points.txt"]
    assert text["top_level.txt"].split() == ["gpuckpt"]
    assert "License-Expression: MIT" in text["METADATA"]
    assert "Requires-Python: >=3.11" in text["METADATA"]


def test_without_a_compiler(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the libraries is there; the doctor says that they are not, and the rest works."""
    monkeypatch.setenv("CC", "false")
    with zipfile.ZipFile(_build("wheel", tree)) as wheel:
        assert {n for n in wheel.namelist() if n.endswith(".so") or n in _modules()} == _modules()
        wheel.extractall(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("GPUCKPT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("GPUCKPT_SIMULATE", raising=False)
    lines = {c["name"]: c for c in _run("doctor")["checks"]}
    for name in ("preload library", "pool library"):
        assert lines[name]["status"] == "warning"
        assert "was not built when gpuckpt was installed" in lines[name]["message"]
        assert "gcc" in lines[name]["fix"]
    assert _run("demo", "--simulate")["ok"]


def test_the_pythons_that_it_says() -> None:
    """What was taken out of their standard library is not imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith("Programming Language :: Python :: ")}
    assert (project["requires-python"], versions) == (">=3.11", {"3.11", "3.12", "3.13"})
    gone = {
        "asynchat",
        "asyncore",
        "cgi",
        "cgitb",
        "crypt",
        "distutils",
        "imghdr",
        "imp",
        "nntplib",
        "pipes",
        "smtpd",
        "spwd",
        "telnetlib",
        "uu",
    }
    for part in SOURCES:
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 11))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {n.partition(".")[0] for n in names} & gone, path


def _files(tree: Path) -> set[Path]:
    return {p.relative_to(tree) for p in tree.rglob("*") if p.is_file()}


def _build(kind: str, tree: Path) -> Path:
    out = tree.parent / f"{kind}-of-{tree.name}"
    done = subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def _run(*words: str) -> dict[str, Any]:
    """The document of a command, by the package on ``PYTHONPATH``."""
    script = "import gpuckpt, os; assert gpuckpt.__file__.startswith(os.environ['PYTHONPATH']); from gpuckpt.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script, *words, "--json"], capture_output=True, text=True, check=False)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _modules() -> set[str]:
    return {f"{into}/{p.relative_to(ROOT / part)}" for part, into in SOURCES.items() for p in (ROOT / part).rglob("*.py")}

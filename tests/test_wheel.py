"""What a wheel of this tree has in it, and what not."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What git has of this tree: building beside a build/ of old, or in the tree itself, would tell of other things."""
    copy = tmp_path / "tree"
    for part in ("ckpt", "cli", "nccl", "tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for part in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / part, copy / part)
    return copy


def test_a_wheel_has_the_package_and_nothing_else(tree: Path) -> None:
    names = _names(_build("wheel", tree))
    metadata = next(n.split("/")[0] for n in names if n.endswith(".dist-info/METADATA"))
    package = {n for n in names if not n.startswith(f"{metadata}/")}
    assert package == {"gpuckpt/py.typed", "gpuckpt/failures.md", *LIBRARIES, *_modules()}
    assert {n.rpartition("/")[0] for n in package} == PACKAGES
    rest = {n.removeprefix(f"{metadata}/") for n in names - package}
    assert rest == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


def test_without_a_compiler_all_but_the_libraries_is_there(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _names(_build("wheel", tree))
    for left in ("build", *(f"ckpt/{name.removeprefix('gpuckpt/')}" for name in LIBRARIES)):
        subprocess.run(["rm", "-rf", tree / left], check=True)
    monkeypatch.setenv("CC", "false")
    assert whole - _names(_build("wheel", tree)) == LIBRARIES


def test_its_entry_point_and_licence(tree: Path) -> None:
    with zipfile.ZipFile(_build("wheel", tree)) as wheel:
        text = {n.rpartition("/")[2]: wheel.read(n).decode() for n in wheel.namelist() if ".dist-info/" in n}
    assert "gpuckpt = gpuckpt.cli.main:main" in text["entry_points.txt"]
    assert text["top_level.txt"].split() == ["gpuckpt"]
    assert "License-Expression: MIT" in text["METADATA"]
    assert "Requires-Python: >=3.11" in text["METADATA"]


def test_a_wheel_built_from_the_sdist_is_the_same(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(_build("sdist", tree)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert _names(_build("wheel", unpacked)) == _names(_build("wheel", tree))


def test_the_pythons_that_it_says() -> None:
    """Only one is here. Of the others: what was taken out of their standard library is not imported."""
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


def _build(kind: str, tree: Path) -> Path:
    out = tree.parent / f"{kind}-of-{tree.name}"
    done = subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {n for n in file.namelist() if not n.endswith("/")}


def _modules() -> set[str]:
    return {f"{into}/{p.relative_to(ROOT / part)}" for part, into in SOURCES.items() for p in (ROOT / part).rglob("*.py")}

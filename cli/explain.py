"""`gpuckpt explain`."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import click

from gpuckpt import errors
from gpuckpt.cli import completing
from gpuckpt.cli.common import execute, json_option
from gpuckpt.model import Report

#: docs/failures.md, as the package has it.
TABLE = Path(errors.__file__).with_name("failures.md")


@dataclass(frozen=True, slots=True)
class Failure:
    """A code, what kind of failure it is, and the paragraphs about it."""

    code: str
    kind: str
    text: str

    @property
    def exit_code(self) -> int:
        return errors.by_code()[self.code].exit_code


@click.command()
@click.argument("code", required=False, default="", shell_complete=completing.codes)
@json_option
def explain(code: str, as_json: bool) -> None:
    """Say what the CODE at the end of a message means: what happened, how things are now, and what to do.

    CODE may be an exit status, too; without one all codes are listed.

    \b
    Examples:
      gpuckpt explain gpu-memory
      gpuckpt explain 6            what exits with 6
      gpuckpt explain              every code
    """
    execute("explain", as_json, lambda: report(code), show)


def report(code: str) -> Report:
    """The failures that *code* stands for, under ``details``. Raises :class:`gpuckpt.errors.Usage` for a word that is none."""
    word = code.strip().strip("[]`").lower()
    found = [f for f in failures() if word in ("", f.code) or (word.isdecimal() and f.exit_code == int(word))]
    if not found:
        raise errors.Usage(f"{code!r} is neither a code nor an exit status of gpuckpt", hint="gpuckpt explain lists them")
    rows = [{"code": f.code, "exit_code": f.exit_code, "kind": f.kind, "text": f.text} for f in found]
    return Report("explain", True, simulated=False, details={"failures": rows, "_whole": word != "" and not word.isdecimal()})


def show(done: Report) -> None:
    rows = done.details["failures"]
    if done.details["_whole"]:
        for row in rows:
            click.echo(f"{row['code']}: {row['kind'][0].lower()}{row['kind'][1:]}\n")
            click.echo(click.wrap_text(row["text"], min(100, shutil.get_terminal_size().columns), preserve_paragraphs=True))
        return
    width = max(len(row["code"]) for row in rows)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        click.echo(kind)
        for row in (r for r in rows if r["kind"] == kind):
            click.echo(f"  {row['code']:{width}}  exit {row['exit_code']}")


def failures() -> list[Failure]:
    """All of them, in the order of the table."""
    found, kind = [], ""
    for heading in re.finditer(r"^(#{1,2}) ([^\n]+)\n(.*?)(?=^#|\Z)", TABLE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if heading[1] == "#":
            kind = heading[2]
        else:
            found.append(Failure(heading[2].strip("`"), kind, _plain(heading[3])))
    return found


def _plain(markdown: str) -> str:
    """The words alone, a paragraph a line. Of links to other documents the name stays."""
    words = re.sub(r"\[([^]]+)\]\(([\w-]+\.md)[^)]*\)", r"\1 (docs/\2)", markdown)
    words = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", words).replace("`", "").replace("**", "")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in words.strip().split("\n\n"))

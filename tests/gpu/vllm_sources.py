"""What a Python source says, without importing it."""

from __future__ import annotations

import ast
from pathlib import Path


class Source:
    def __init__(self, path: Path) -> None:
        self.text = path.read_text() if path.exists() else ""
        self._module = ast.parse(self.text)
        self._classes = {n.name: n for n in ast.walk(self._module) if isinstance(n, ast.ClassDef)}

    def parameters(self, cls: str, function: str) -> list[str]:
        found = self._find(cls, function)
        return [a.arg for a in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)] if found else []

    def body(self, cls: str, function: str) -> str:
        found = self._find(cls, function)
        return ast.get_source_segment(self.text, found) or "" if found else ""

    def functions(self, cls: str) -> list[str]:
        return [n.name for n in self._body(cls) if isinstance(n, ast.FunctionDef)]

    def _find(self, cls: str, function: str) -> ast.FunctionDef | None:
        return next((n for n in self._body(cls) if isinstance(n, ast.FunctionDef) and n.name == function), None)

    def _body(self, cls: str) -> list[ast.stmt]:
        """Of a class, or of the module where *cls* is ""."""
        return self._classes[cls].body if cls in self._classes else [] if cls else self._module.body


def has(text: str, *words: str) -> bool:
    return all(each in text for each in words)


def in_order(text: str, *words: str) -> bool:
    """*words* are there, each before the next."""
    found = [text.find(each) for each in words]
    return found[0] >= 0 and found == sorted(found)

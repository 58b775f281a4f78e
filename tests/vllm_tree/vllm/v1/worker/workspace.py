from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from vllm.device_allocator import cumem


class Older:
    def __init__(self) -> None:
        self._current_workspaces: list[Any] = [None]

    def _ensure_workspace_size(self, required_bytes: int) -> Any:
        """In the pool of the innermost context; torch's own memory is not simulated."""
        had = self._current_workspaces[0]
        if had is None or had.nbytes < required_bytes:
            address = cumem.ROUTES[-1].allocate(required_bytes) if cumem.ROUTES else 0
            self._current_workspaces[0] = SimpleNamespace(nbytes=required_bytes, address=address)
        return self._current_workspaces[0]


class Newer(Older):
    """As of 0.32."""

    def __init__(self, alloc_context: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._alloc_context = alloc_context

    def _ensure_workspace_size(self, required_bytes: int) -> Any:
        with self._alloc_context():
            return super()._ensure_workspace_size(required_bytes)


WorkspaceManager: Any = Newer if os.environ.get("FAKE_VLLM") == "newer" else Older

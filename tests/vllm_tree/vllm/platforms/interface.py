from __future__ import annotations

from typing import Any


class Platform:
    def graph_pool_handle(self) -> Any:
        return (0, 1)

    _global_graph_pool: Any | None = None

    def get_global_graph_pool(self) -> Any:
        cls = self.__class__
        if cls._global_graph_pool is None:
            cls._global_graph_pool = self.graph_pool_handle()
        return cls._global_graph_pool


current_platform = Platform()

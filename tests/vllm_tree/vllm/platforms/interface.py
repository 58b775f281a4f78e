from __future__ import annotations

from typing import Any


class Platform:
    def graph_pool_handle(self) -> Any:
        return (0, 1)

    def get_global_graph_pool(self) -> Any:
        return self.graph_pool_handle()


current_platform = Platform()

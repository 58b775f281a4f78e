from __future__ import annotations

import os
from importlib.metadata import entry_points

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
plugins_loaded = False


def load_general_plugins() -> None:
    global plugins_loaded  # noqa: PLW0603
    if plugins_loaded:
        return
    plugins_loaded = True
    if os.environ.get("FAKE_POOL"):
        import fake_pool  # noqa: F401 - takes the place of gpuckpt.pool
    for plugin in entry_points(group=DEFAULT_PLUGINS_GROUP):
        plugin.load()()

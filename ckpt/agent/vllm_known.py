"""Whether what gpuckpt takes hold of in vLLM is there and is called as expected: a look at vLLM's own classes, whatever its version is.

``tests/vllm_versions.json`` has what each version of vLLM showed; the adapters decide over each of them as over a live one in its tests.
"""

from __future__ import annotations

import inspect
from typing import Any


def known(owner: Any, name: str, *parameters: str) -> Any:
    """``owner.name``, which takes *parameters* first. Raises AttributeError, in words, if it is not there or takes others."""
    found = getattr(owner, name)
    taken = tuple(inspect.signature(found).parameters)
    if taken[: len(parameters)] != parameters:
        raise AttributeError(f"{owner.__name__}.{name} takes ({', '.join(taken)}), not ({', '.join(parameters)})")
    return found

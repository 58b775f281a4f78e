"""Which requests may pass the gate, and which of them need the GPU.

What reaches the server is a list of what vLLM's users call, not of what they must not: a dev endpoint that a later version adds is
closed from the start. A path is judged in every reading that a server may give it, and one with two readings is turned away.
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote

#: First parts of the paths that users of a vLLM server call.
OPEN = frozenset(
    "v1 v2 health ping metrics version load tokenize detokenize tokenizer_info pooling classify score rerank generative_scoring "
    "invocations inference docs redoc openapi.json".split()
)
#: POSTs that the API server answers by itself; SageMaker's POST /ping asks for its health.
WITHOUT_GPU = frozenset(["/tokenize", "/detokenize", "/v1/messages/count_tokens", "/ping", "/health"])
#: Where vLLM has a WebSocket.
WEBSOCKETS = frozenset(["/v1/realtime"])
_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_TRICKS = re.compile(r"//|/\.\.?(/|$)|[\\\x00-\x1f\x7f;]")


def origin_form(target: str) -> str:
    """The path and query of a request's target, without a fragment; of ``http://host/path`` what follows the host."""
    if not target.startswith("/"):
        target = _AUTHORITY.sub("", target, count=1) or "/"
    return target.partition("#")[0]


@lru_cache
def plain(path: str) -> str | None:
    """*path* (no query) as a server reads it, decoded; None where another server could read it in another way."""
    for _ in range(4):
        if not path.startswith("/") or _TRICKS.search(path):
            return None
        decoded = unquote(path, errors="replace")
        if decoded == path:
            return path
        path = decoded
    return None


def may_pass(path: str, *, hidden: bool) -> bool:
    """Whether the plain *path* is for users. *hidden*: the server has dev endpoints that are not."""
    return not hidden or path == "/" or path[1:].partition("/")[0] in OPEN


def needs_gpu(method: str, path: str, *, websocket: bool) -> bool:
    """Whether a request must find the server awake. Looking (GET, HEAD, OPTIONS) never does."""
    if websocket:
        return True
    return method not in ("GET", "HEAD", "OPTIONS", "TRACE") and path.rstrip("/") not in WITHOUT_GPU

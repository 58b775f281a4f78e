"""A store on torch's TCPStore. torch is imported here and nowhere else, and only for a rendezvous that asks for it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gpuckpt import errors
from gpuckpt.errors import GpuckptError
from gpuckpt.rendezvous.prompt import ANSWER_DEADLINE_S, within


class C10dStore:
    """The host that *host* is an address of serves it, if nobody does yet, for as long as its command runs; the others connect, once
    it is there: *wait* is called again and again until then, and what it raises ends that."""

    ends = True

    def __init__(self, host: str, port: int, name: str, wait: Callable[[], None], answer_s: float = ANSWER_DEADLINE_S) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # we have words of our own for a store that is gone
        try:
            from torch.distributed import TCPStore
        except ImportError as e:
            raise errors.Usage(
                "a c10d rendezvous needs torch, which is not installed beside gpuckpt",
                hint="pip install 'gpuckpt[torch]', or --rendezvous file:///SHARED/DIRECTORY/NAME",
            ) from e
        self._where, self._prefix = f"{host}:{port}", f"gpuckpt/{name}/"
        listening = _listen(host, port)
        self.serving = listening is not None
        self.open_to_others = not _is_loopback(host)
        while not self.serving and not _answers(host, port):
            wait()
        more: dict[str, Any] = {"master_listen_fd": listening.detach()} if listening is not None else {}
        answer = timedelta(seconds=answer_s)
        try:
            self._store = within(answer_s, lambda: TCPStore(host, port, None, self.serving, timeout=answer, wait_for_workers=False, **more))
        except (RuntimeError, TimeoutError) as e:
            raise errors.RendezvousLost(
                f"no store answers at {self._where} ({_first_line(e) or 'silence'}); nothing was touched",
                hint=f"start the command on the host that {host} is an address of",
            ) from e

    def get(self, key: str) -> bytes | None:
        try:
            if not self._store.check([self._prefix + key]):  # a get would wait for it
                return None
            return bytes(self._store.get(self._prefix + key))
        except RuntimeError as e:
            raise self._lost(e) from e

    def compare_set(self, key: str, value: bytes) -> bytes:
        try:
            return bytes(self._store.compare_set(self._prefix + key, "", value.decode()))
        except RuntimeError as e:
            raise self._lost(e) from e

    def close(self) -> None:
        del self._store

    def _lost(self, e: RuntimeError) -> GpuckptError:
        return errors.RendezvousLost(f"the store at {self._where} cannot be reached ({_first_line(e)})")


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens on *host*, and on no other address; None where *host* is another machine, or somebody serves there already."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(1024)
        except OSError:
            made.close()
            return None
        return made
    return None


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _first_line(e: Exception) -> str:
    return str(e).partition("\n")[0]

"""``TCPStore``: one JSON list a line and direction. As torch's it raises ``RuntimeError`` where the one that serves is gone or silent."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from datetime import timedelta
from typing import Any


class _Server:
    def __init__(self, listening: socket.socket) -> None:
        self.listening, self.values, self.changed = listening, dict[str, str](), threading.Condition()
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self.listening, *self.connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listening.accept()
                self.connections.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock.makefile("rw") as lines:
            for line in lines:
                lines.write(json.dumps(self._answer(*json.loads(line))) + "\n")
                lines.flush()

    def _answer(self, call: str, key: str, expected: str = "", desired: str = "") -> Any:
        with self.changed:
            if call == "check":
                return key in self.values
            if call == "compare_set" and self.values.get(key, "") == expected:
                self.values[key] = desired
                self.changed.notify_all()
            self.changed.wait_for(lambda: key in self.values)
            return self.values[key]


class TCPStore:
    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        master_listen_fd: int | None = None,
    ) -> None:
        assert world_size is None
        assert not wait_for_workers
        self._server = _Server(socket.socket(fileno=master_listen_fd)) if is_master else None
        self._timeout_s = timeout.total_seconds()
        try:
            self._sock = socket.create_connection((host_name, port), self._timeout_s)
        except OSError as e:
            raise RuntimeError(f"The client socket has failed to connect to {host_name}:{port} ({e})") from e
        self._read = b""

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", *keys))

    def get(self, key: str) -> bytes:
        return str(self._ask("get", key)).encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return str(self._ask("compare_set", key, expected, desired)).encode()

    def __del__(self) -> None:
        if sock := getattr(self, "_sock", None):
            sock.close()
        if self._server:
            self._server.close()

    def _ask(self, *words: str) -> Any:
        until = time.monotonic() + self._timeout_s
        try:
            self._sock.sendall(json.dumps(words).encode() + b"\n")
            while b"\n" not in self._read:
                self._sock.settimeout(max(0.001, until - time.monotonic()))
                data = self._sock.recv(1 << 20)
                if not data:
                    raise OSError("Connection was closed by remote peer")
                self._read += data
        except OSError as e:
            raise RuntimeError(f"wait timeout or failed to recv ({e})") from e
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

"""Values as they lie in a store: JSON, authenticated with a key that all hosts have. The key's file is read here."""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
from pathlib import Path
from typing import Any

from gpuckpt import errors

VERSION = 1
KEY_LEAST_BYTES = 16


class Seal:
    """Closes and opens the values of the rendezvous *name*. Without a *key* nothing is authenticated."""

    def __init__(self, name: str, key: bytes = b"") -> None:
        self._name, self._key = name, key

    def close(self, key: str, body: dict[str, Any]) -> bytes:
        return json.dumps({"version": VERSION, "body": body, "mac": self._mac(key, body)}).encode()

    def open(self, key: str, data: bytes) -> dict[str, Any]:
        """Raises :class:`gpuckpt.errors.RendezvousKey` for what was not closed by one who has our key, under this very *key*."""
        try:
            document = json.loads(data)
            version, body, mac = document["version"], document["body"], document["mac"]
            if version != VERSION:
                raise errors.SeveralHosts(
                    f"another host has another gpuckpt: it writes version {version} into the rendezvous, this one {VERSION}",
                    hint="the same gpuckpt on all hosts",
                )
            genuine = isinstance(body, dict) and hmac.compare_digest(str(mac), self._mac(key, body))
        except (ValueError, KeyError, TypeError):
            genuine = False
        if not genuine:
            raise errors.RendezvousKey(
                f"a value in the rendezvous {self._name} was not written with this host's key",
                hint="the same --rendezvous-key file on every host, or another NAME if somebody else uses this one",
            )
        found: dict[str, Any] = body
        return found

    def _mac(self, key: str, body: dict[str, Any]) -> str:
        if not self._key:
            return ""
        text = json.dumps([VERSION, self._name, key, body], sort_keys=True)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def read_key(path: str) -> bytes:
    """The key in the file *path*. Raises :class:`gpuckpt.errors.Usage` for one that others can read, or that is too short to be one."""
    make = f"(umask 077; head -c 32 /dev/urandom | base64 > {path}), and copy it to every host"
    try:
        mode, key = Path(path).stat().st_mode, Path(path).read_bytes().strip()
    except OSError as e:
        raise errors.Usage(f"the key file {path} cannot be read ({e.strerror})", hint=make) from e
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise errors.Usage(f"the key file {path} can be read by others", hint=f"chmod 600 {path}")
    if len(key) < KEY_LEAST_BYTES:
        raise errors.Usage(f"the key file {path} has {len(key)} bytes; a key has at least {KEY_LEAST_BYTES}", hint=make)
    return key

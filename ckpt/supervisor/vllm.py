"""``vllm serve`` as a supervised command: what is changed about it before it starts, and how it goes to sleep and wakes up.

The changes are made for reasons that hold for each alone, and each can be refused alone (``--without``):

``gate``                the server listens on a unix socket in a private directory; its ``--host`` and ``--port`` become the gate's
``dev-mode``            ``VLLM_SERVER_DEV_MODE=1``: the endpoints ``/sleep`` and ``/wake_up``, which only the gate reaches
``sleep-mode``          ``--enable-sleep-mode``: weights leave at link speed, the cache is dropped, the driver copies only the rest
``custom-all-reduce``   ``--disable-custom-all-reduce``: it shares GPU memory between processes, which no checkpoint survives
``nccl``                on several GPUs: the variables of ``gpuckpt env --vllm``, so that NCCL's communicators can be suspended
``agent``               on several GPUs: ``GPUCKPT_AGENT=1``, an agent in each worker, which suspends them
``fusion``              on several GPUs: no all-reduce fused with what follows it, which FlashInfer does by mappings of its own
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt import errors
from gpuckpt.nccl import environment

if TYPE_CHECKING:
    from gpuckpt.supervisor.upstream import Upstream

CHANGES = ("gate", "dev-mode", "sleep-mode", "custom-all-reduce", "nccl", "agent", "fusion")
AGENT = "GPUCKPT_AGENT"
FUSION_OFF = '{"pass_config": {"fuse_allreduce_rms": false}}'
DEV_MODE = "VLLM_SERVER_DEV_MODE"
API_KEY = "VLLM_API_KEY"
ROOT_PATH = "root-path"
DEFAULT_PORT = 8000
#: How long /sleep and /wake_up may take, in seconds. Measured with 44 GiB: 7.4 the first time, 0.3 later.
SLEEP_S = 300.0
ANSWER_S = 60.0


@dataclass(frozen=True)
class Prepared:
    """A command as it will be started, and what the gate takes over from it."""

    command: tuple[str, ...]
    environ: dict[str, str]  # what is added to ours
    host: str = ""
    port: int = DEFAULT_PORT
    keys: tuple[str, ...] = ()
    sleeps: bool = False  # whether /sleep and /wake_up are there and of use
    hidden: bool = False  # whether we opened the dev endpoints, which must not be reachable then
    gate: bool = True
    gpu_count: int | None = None  # how many it uses; None: all that it sees
    warnings: tuple[str, ...] = ()
    changes: dict[str, str] = field(default_factory=dict)  # change -> what it did


def recognise(command: Sequence[str]) -> bool:
    """Whether *command* is certainly a vLLM server: ``vllm serve``, by an interpreter or ``uv run`` if need be, or the module."""
    words = list(command)
    if words[:2] == ["uv", "run"]:
        words = words[2:]
    elif words and Path(words[0]).name.startswith("python"):
        words = words[1:]
        if words[:1] == ["-m"] and len(words) > 1:
            return words[1] == "vllm.entrypoints.openai.api_server" or (words[1].startswith("vllm") and words[2:3] == ["serve"])
    return len(words) > 1 and Path(words[0]).name == "vllm" and words[1] == "serve"


def prepare(command: Sequence[str], environ: Mapping[str, str], socket: str, without: Collection[str] = ()) -> Prepared:
    """*command* with its changes. Raises :class:`gpuckpt.errors.Usage` for options that the gate cannot take over."""
    words, options = list(command), _Options(command)
    warnings: list[str] = []
    changes: dict[str, str] = {}
    added: dict[str, str] = {}
    for name in ("ssl-keyfile", "ssl-certfile", "uds", "headless"):
        if options.has(name) and "gate" not in without:
            raise errors.Usage(
                f"--{name} cannot be used behind the gate, which speaks HTTP for the server; nothing was started",
                hint="leave it out and terminate TLS in front of the gate, or refuse the gate: --without gate",
            )
    if "gate" not in without and options.has(ROOT_PATH):
        raise errors.Usage(
            f"--{ROOT_PATH} cannot be used behind the gate: vLLM takes it off the paths that it is asked for, "
            "so what the gate turns away would be reached under another name; nothing was started",
            hint="leave it out, and have the proxy in front of the gate strip the prefix; or refuse the gate: --without gate",
        )
    if options.has("config"):
        warnings.append("--config is not read: host, port and API key that it sets are not known to the gate; give them as options")
    host, port = options.value("host") or "", _port(options.value("port"))
    keys = tuple(filter(None, options.values("api-key") or [environ.get(API_KEY, "")]))  # as vLLM: the option replaces the variable

    if "gate" not in without:
        words = options.without("host", "port")
        words += ["--uds", socket]
        if options.has("config"):
            words.append(f"--{ROOT_PATH}=")  # whatever the file says
        changes["gate"] = f"--uds {socket}, in the place of --host and --port: these are the gate's"
    dev = environ.get(DEV_MODE, "")
    if dev not in ("", "1"):
        warnings.append(f"{DEV_MODE}={dev} was set by you and is kept: vLLM cannot be asked to sleep, the driver takes all of it")
    elif "dev-mode" not in without and "gate" not in without:
        added[DEV_MODE] = dev = "1"
        changes["dev-mode"] = f"{DEV_MODE}=1"
    sleep = options.flag("enable-sleep-mode")
    if sleep is False:
        warnings.append("--no-enable-sleep-mode was set by you and is kept: the driver takes all of it, which is slower")
    elif sleep is None and "sleep-mode" not in without:
        words.append("--enable-sleep-mode")
        changes["sleep-mode"] = "--enable-sleep-mode"
        sleep = True
    reduce = options.flag("disable-custom-all-reduce")
    if reduce is False:
        warnings.append("--no-disable-custom-all-reduce was set by you and is kept: with several GPUs a suspend will be refused")
    elif reduce is None and "custom-all-reduce" not in without:
        words.append("--disable-custom-all-reduce")
        changes["custom-all-reduce"] = "--disable-custom-all-reduce"
    count = math.prod(_size(options, n) for n in _SIZES)
    unknown = options.has("config") and count == 1  # the file may have several
    if count > 1 or unknown:
        _for_several_gpus(words, options, environ, (*without, "fusion") if unknown else without, added, changes, warnings)
    gate = "gate" not in without
    return Prepared(
        tuple(words),
        added,
        host,
        port,
        keys,
        sleeps=bool(sleep) and dev == "1" and gate,
        hidden=dev == "1",
        gate=gate,
        gpu_count=None if unknown else count,
        warnings=tuple(warnings),
        changes=changes,
    )


def _for_several_gpus(
    words: list[str],
    options: _Options,
    environ: Mapping[str, str],
    without: Collection[str],
    added: dict[str, str],
    changes: dict[str, str],
    warnings: list[str],
) -> None:
    """What lets communicators be suspended. What the user set stays, with a warning where that is in the way."""
    if "nccl" not in without:
        merged, said = environment.merged(environ, for_vllm=True)
        wanted = {k: v for k, v in merged.items() if k not in environ and k != AGENT}
        added.update(wanted)
        warnings += said
        changes["nccl"] = " ".join(f"{k}={v}" for k, v in wanted.items())
    if "agent" not in without and AGENT not in environ:
        added[AGENT] = "1"
        changes["agent"] = f"{AGENT}=1"
    if "fusion" not in without and not options.has("compilation-config"):
        words += ["--compilation-config", FUSION_OFF]
        changes["fusion"] = f"--compilation-config {FUSION_OFF}"
    elif "fusion" not in without and "fuse_allreduce_rms" not in " ".join(words):
        warnings.append(
            "--compilation-config was set by you and is kept: where FlashInfer is there, it must have pass_config.fuse_allreduce_rms off"
        )


class Vllm:
    """A running ``vllm serve``: an upstream that can sleep."""

    def __init__(self, upstream: Upstream, sleeps: bool, keeps_cache: bool = False) -> None:
        self._upstream, self._sleeps, self._keeps_cache = upstream, sleeps, keeps_cache
        self._denied = False  # it said that it could not sleep

    async def healthy(self) -> bool:
        return await self._upstream.healthy()

    async def asleep(self) -> bool:
        if not self._sleeps:
            return False
        status, body = await self._upstream.call("GET", "/is_sleeping", within_s=ANSWER_S)
        return status == 200 and bool(json.loads(body)["is_sleeping"])

    async def quiet(self, within_s: float) -> bool:
        """By sleep level 0: no new work. One of level 1 that nobody waits for any more cannot be called off: it would take the memory away
        from a server that has been woken since."""
        try:
            if self._sleeps:
                await self._ask("/sleep?level=0&mode=wait", within_s)
        except errors.ServerRefused as e:
            if isinstance(e.__cause__, TimeoutError):
                return False
            raise
        return True

    async def sleep(self) -> None:
        """Level 1: weights to host memory, cache dropped. To keep the cache, level 0: no new work, and the driver takes all of it.
        The mode is named, since the default aborts what runs."""
        if not self._sleeps:
            return
        try:
            await self._ask(f"/sleep?level={0 if self._keeps_cache else 1}&mode=wait")
        except errors.ServerRefused as e:
            self._denied = e.__cause__ is None  # it answered
            raise

    async def wake(self, *, gone: bool = False) -> None:
        """Where another program takes more of a GPU than the server gives up meanwhile, vLLM's workers sleep and then say that they cannot
        (``Memory usage increased after sleeping``). Its executor believes them, would wake nobody, and die of the next request: so they
        are told themselves first."""
        if not self._sleeps:
            return
        if self._denied and gone:
            await self._ask("/collective_rpc", body={"method": "wake_up"})
        await self._ask("/wake_up?tags=scheduling" if self._keeps_cache else "/wake_up")
        self._denied = False

    async def answers(self, prompt: str, tokens: int) -> dict[str, str]:
        """The text that each model gives, adapters included. Raises :class:`gpuckpt.errors.ServerRefused`."""
        status, body = await self._upstream.call("GET", "/v1/models", within_s=ANSWER_S)
        if status != 200:
            raise errors.ServerRefused(f"vLLM answered GET /v1/models with {status}")
        found = {}
        try:
            for name in [m["id"] for m in json.loads(body)["data"]]:
                order = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
                status, body = await self._upstream.call("POST", "/v1/completions", within_s=ANSWER_S, body=order)
                if status != 200:
                    said = body[:200].decode(errors="replace")
                    raise errors.ServerRefused(f"vLLM answered the golden prompt to {name} with {status}: {said}")
                found[name] = str(json.loads(body)["choices"][0]["text"])
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise errors.ServerRefused(f"vLLM's answer to the golden prompt is not understood: {type(e).__name__}: {e}") from e
        return found

    async def _ask(self, path: str, within_s: float = SLEEP_S, body: object = None) -> None:
        status, answer = await self._upstream.call("POST", path, within_s=within_s, body=body)
        if status != 200:
            said = answer[:200].decode(errors="replace")
            raise errors.ServerRefused(f"vLLM answered POST {path} with {status}: {said}", hint="see what the server logged")


class _Options:
    """The options in a command line, as vLLM reads them: ``--a-b X``, ``--a-b=X``, with underscores, and by their beginning alone."""

    def __init__(self, command: Sequence[str]) -> None:
        self._words = list(command)

    def has(self, name: str) -> bool:
        return any(n == name for n, _, _ in self._found())

    def value(self, name: str) -> str | None:
        """Its last value, which is the one that counts."""
        found = [v for n, _, v in self._found() if n == name]
        return found[-1][0] if found and found[-1] else None

    def values(self, name: str) -> list[str]:
        found = [v for n, _, v in self._found() if n == name]
        return found[-1] if found else []

    def flag(self, name: str) -> bool | None:
        """True for ``--name``, False for ``--no-name``, None for neither."""
        found = [n == name for n, _, _ in self._found() if n in (name, f"no-{name}")]
        return found[-1] if found else None

    def without(self, *names: str) -> list[str]:
        """The command line without these options, each of which takes one value."""
        drop: set[int] = set()
        for name, at, _ in self._found():
            if name in names:
                drop.add(at)
                if "=" not in self._words[at]:
                    drop.add(at + 1)
        return [w for i, w in enumerate(self._words) if i not in drop]

    def _found(self) -> list[tuple[str, int, list[str]]]:
        """(name with dashes, position, values) of each option."""
        found = []
        for at, word in enumerate(self._words):
            short, sign, value = word.partition("=")
            short = short.partition(".")[0]  # --compilation-config.mode sets a part of it
            if short in _SHORT:
                name = _SHORT[short]
            elif word.startswith("--") and word != "--":
                name = _whole(short[2:].replace("_", "-"))
            else:
                continue
            values = [value] if sign else []
            for following in self._words[at + 1 :] if not sign else ():
                if following.startswith("-"):
                    break
                values.append(following)
            found.append((name, at, values))
        return found


#: Options by which a server has several GPUs.
_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "prefill-context-parallel-size")
#: Short forms of vLLM's options that matter here.
_SHORT = {**dict(zip(("-tp", "-pp", "-dp", "-pcp"), _SIZES, strict=True)), "-cc": "compilation-config"}
_FLAGS = ("enable-sleep-mode", "disable-custom-all-reduce")
#: Whole names of all of them.
_KNOWN = (
    *("api-key", "compilation-config", "config", "headless", "host", "port", "ssl-certfile", "ssl-keyfile", "uds", ROOT_PATH),
    *(*_SIZES, *_FLAGS, *(f"no-{name}" for name in _FLAGS)),
)


def _whole(name: str) -> str:
    """The option that *name* stands for: vLLM takes its beginning for it, where no other one begins so."""
    return next((known for known in _KNOWN if name and known.startswith(name)), name) if name not in _KNOWN else name


def _size(options: _Options, name: str) -> int:
    text = options.value(name) or "1"
    return int(text) if text.isdecimal() and int(text) else 1


def _port(text: str | None) -> int:
    if text is None:
        return DEFAULT_PORT
    if not text.isdecimal() or not 0 <= int(text) < 65536:
        raise errors.Usage(f"--port {text} is not a port")
    return int(text)

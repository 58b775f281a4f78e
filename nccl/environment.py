"""The settings with which a program must start so that its communicators can be suspended, and what is wrong with those it has.

NCCL reads its settings once, when it first needs them: a running process cannot be mended, only started again.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuckpt.model import Hazard

#: What starts a program with these settings; the cure of most hazards here.
CURE = 'start the program again after: eval "$(gpuckpt env)"'
VLLM_CURE = 'start vLLM again after: eval "$(gpuckpt env --vllm)"'
#: vLLM's custom all-reduce has no variable; it maps the memory of its peers by legacy IPC.
VLLM_OPTION = "--disable-custom-all-reduce"
#: Where FlashInfer is installed vLLM fuses its all-reduce with what follows it, through a workspace that maps the memory of the peers.
VLLM_FUSION_OPTION = """--compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable. ``value`` is what a child starts with, ``None`` where nothing is to be set and only some values do harm.

    ``good`` are the numbers that are safe (``None``: every number but those in ``bad``), ``unset_is_safe`` whether its default is.
    ``scope`` is who reads it: "nccl", "torch" or "vllm".
    """

    name: str
    value: str | None
    why: str
    good: tuple[int, ...] | None = None
    bad: tuple[int, ...] = ()
    unset_is_safe: bool = False
    scope: str = "nccl"

    def breaks(self, value: str | None) -> bool:
        """Whether *value* (``None``: not set) keeps a communicator from being suspended, or from living through it."""
        number = _number(value, words=self.scope == "torch")
        if number is None:
            return not self.unset_is_safe
        return number in self.bad if self.good is None else number not in self.good

    @property
    def cure(self) -> str:
        if self.value is None:
            return f"unset {self.name} and start the program again"
        return VLLM_CURE if self.scope == "vllm" else CURE


SETTINGS = (
    Setting(
        "NCCL_CUMEM_ENABLE",
        "1",
        "peers then map each other's memory through handles that a suspend can give back; "
        "with legacy CUDA IPC a suspend says that it worked, releases nothing, and the restore loses the process",
        bad=(0,),
        unset_is_safe=True,
    ),
    Setting(
        "NCCL_NVLS_ENABLE",
        "0",
        "NVLink SHARP keeps multicast objects that a suspend does not release: the driver's checkpoint hangs, or cannot be restored",
        good=(0,),
    ),
    Setting(
        "NCCL_CUMEM_HOST_ENABLE",
        "0",
        "shared host buffers are then plain shared memory; as cuMem handles they are imports that a suspend does not release",
        good=(0,),
    ),
    Setting(
        "NCCL_GRAPH_REGISTER",
        "0",
        "buffers that CUDA graphs use are otherwise registered with the peers, and a suspend does not release that",
        good=(0,),
    ),
    Setting(
        "NCCL_LOCAL_REGISTER",
        "0",
        "buffers that the program registers are mapped by the peers, and a suspend does not release that",
        good=(0,),
    ),
    Setting("NCCL_WIN_ENABLE", "0", "symmetric windows are mappings of the peers' memory that a suspend does not release", good=(0,)),
    Setting(
        "NCCL_P2P_DISABLE",
        None,
        "without peer-to-peer NCCL goes through shared memory of the host, whose buffers a suspend does not release",
        good=(0,),
        unset_is_safe=True,
    ),
    Setting("NCCL_DISABLE_MEM_MANAGER", None, "a suspend is refused where NCCL's memory manager is off", good=(0,), unset_is_safe=True),
    Setting(
        "NCCL_COMM_SPLIT_SHARE_RESOURCES",
        None,
        "split communicators that share their parent's resources cannot be suspended",
        good=(0,),
        unset_is_safe=True,
    ),
    Setting(
        "NCCL_MULTI_RANK_GPU_ENABLE",
        None,
        "with two ranks on one GPU the collectives after a resume fail",
        good=(0,),
        unset_is_safe=True,
    ),
    Setting(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "torch's monitor ends a process whose watchdog has not answered for some minutes, and a suspended one does not answer",
        good=(0,),
        scope="torch",
    ),
    Setting(
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        None,
        "torch then registers its memory with the peers, and a suspend does not release that",
        good=(0,),
        unset_is_safe=True,
        scope="torch",
    ),
    Setting(
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "0",
        "torch's symmetric memory maps that of the peers (and multicast), outside NCCL; vLLM uses it by default",
        good=(0,),
        scope="vllm",
    ),
    Setting(
        "VLLM_ALLREDUCE_USE_FLASHINFER",
        "0",
        "FlashInfer's workspaces map the memory of the peers, outside NCCL",
        good=(0,),
        unset_is_safe=True,
        scope="vllm",
    ),
    Setting(
        "VLLM_USE_NCCL_SYMM_MEM",
        "0",
        "vLLM then registers symmetric windows, which a suspend does not release",
        good=(0,),
        unset_is_safe=True,
        scope="vllm",
    ),
    Setting(
        "GPUCKPT_AGENT", "1", "vLLM's processes then have agents, by which gpuckpt holds them between two steps", good=(1,), scope="vllm"
    ),
)


@dataclass(frozen=True, slots=True)
class Configured:
    """A value that a configuration file of NCCL sets, and the file."""

    value: str
    path: str


def settings(*, for_vllm: bool = False) -> dict[str, str]:
    """What a child is to start with, for NCCL and torch, and with *for_vllm* for vLLM."""
    return {s.name: s.value for s in SETTINGS if s.value is not None and (for_vllm or s.scope != "vllm")}


def configuration(environ: Mapping[str, str], *, uid: int | None = None, root: Path = Path("/")) -> dict[str, Configured]:
    """What NCCL's configuration files set for a process with *environ*, user *uid* (ours) and file system *root*.

    As NCCL reads them: ``NCCL_CONF_FILE`` in place of ``~/.nccl.conf`` (of the user's home, whatever ``HOME`` says), then
    ``/etc/nccl.conf``; the first that names a variable has it, and the environment goes before both.
    """
    named = environ.get("NCCL_CONF_FILE")
    files = [named] if named else []
    if not named:
        with contextlib.suppress(KeyError):  # a user without an entry: NCCL reads none either
            files.append(pwd.getpwuid(os.getuid() if uid is None else uid).pw_dir + "/.nccl.conf")
    files.append("/etc/nccl.conf")
    found: dict[str, Configured] = {}
    for name in files:
        try:
            text = (root / name.lstrip("/") if name.startswith("/") else Path(name)).read_text(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            variable, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(variable, Configured(value, name))
    return found


def merged(
    environ: Mapping[str, str], *, for_vllm: bool = False, conf: Mapping[str, Configured] | None = None
) -> tuple[dict[str, str], list[str]]:
    """*environ* with :func:`settings`, and a warning for each value of the user that keeps suspension from working.

    What the user set stays, be it in *environ* or in a configuration file (*conf*, by default read as NCCL does): a variable from
    there would hide the file. Neither *environ* nor ``os.environ`` is changed.
    """
    conf = configuration(environ) if conf is None else conf
    out = dict(environ)
    warnings = []
    for setting in SETTINGS:
        if setting.scope == "vllm" and not for_vllm:
            continue
        value, origin = _effective(setting, environ, conf)
        if origin is None:
            if setting.value is not None:
                out[setting.name] = setting.value
        elif setting.breaks(value):
            keep = "unset it" if setting.value is None else f"set {setting.name}={setting.value}, or unset it"
            if origin:
                keep = f"remove it from {origin}" if setting.value is None else f"set {setting.name}={setting.value} there"
            warnings.append(
                f"{setting.name}={value}{_from(origin)} is kept, but this program cannot be suspended: {setting.why}. To mend it, {keep}"
            )
    return out, warnings


def problems(
    environ: Mapping[str, str],
    conf: Mapping[str, Configured],
    *,
    for_torch: bool = False,
    for_vllm: bool = False,
    pid: int | None = None,
) -> list[Hazard]:
    """What in the environment of a running process (*environ*, *conf*) keeps its communicators from being suspended."""
    scopes = {"nccl", *(["torch"] if for_torch else []), *(["vllm"] if for_vllm else [])}
    found = []
    for setting in SETTINGS:
        value, origin = _effective(setting, environ, conf)
        if setting.scope in scopes and setting.breaks(value):
            said = f"{setting.name}={value}{_from(origin)}" if origin is not None else f"{setting.name} is not set"
            who = "this process" if pid is None else f"pid {pid}"
            message = f"{said} in {who}: {setting.why}"
            cure = setting.cure if not origin else f"set {setting.name}={setting.value or 0} in {origin} and start the program again"
            found.append(Hazard("nccl-communicator", message, cure, pid, acceptable=True))
    return found


def names(scopes: Sequence[str] = ("nccl", "torch", "vllm")) -> list[str]:
    """Every variable that is looked at."""
    return [s.name for s in SETTINGS if s.scope in scopes]


def _effective(setting: Setting, environ: Mapping[str, str], conf: Mapping[str, Configured]) -> tuple[str | None, str | None]:
    """The value that counts, and where from: "" for the environment, the path of a file, ``None`` where nobody set it.

    Only NCCL reads the files.
    """
    if setting.name in environ:
        return environ[setting.name], ""
    if setting.name in conf and setting.scope == "nccl":
        return conf[setting.name].value, conf[setting.name].path
    return None, None


def _from(origin: str | None) -> str:
    return f" (from {origin})" if origin else ""


def _number(value: str | None, *, words: bool) -> int | None:
    """*value* as its reader takes it: a number as C's strtoll (so that a word is 0), for torch also words; ``None`` for unset or empty."""
    word = (value or "").strip().lower()
    if not word:
        return None
    if words and word in ("y", "yes", "t", "true"):
        return 1
    found = re.match(r"([+-]?)(0x[0-9a-f]+|\d+)", word)
    if not found:
        return 0
    number = int(found[2], 16 if found[2].startswith("0x") else 10)
    return -number if found[1] == "-" else number

"""Commands whose program runs elsewhere: a container's client, found behind whatever starts it.

What a client starts is no child of ours, so it could be neither suspended nor ended; gpuckpt must run where the program does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuckpt import errors

CLIENTS = frozenset(
    "docker docker-compose podman podman-compose podman-remote nerdctl finch crictl ctr kubectl oc lxc incus machinectl "
    "srun singularity apptainer enroot ssh".split()
)
_SHELLS = frozenset("sh bash dash zsh ksh".split())
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
#: Words of a shell after which a command begins.
_BEGINS = frozenset("exec command then do else { ( ! time if while until".split())


@dataclass(frozen=True)
class _Starter:
    """A program that turns into another one, or waits for it. *letters*, *names*: its options that take a value, which may be the next
    word; *words*: how many of its own come before the command."""

    letters: str = ""
    names: str = ""
    words: int = 0


_STARTERS = {
    "sudo": _Starter("CDghpRrTtUu", "close-from chdir group host prompt chroot role command-timeout type other-user user"),
    "doas": _Starter("Cu"),
    "runuser": _Starter("ugGw", "user group supp-group whitelist-environment"),
    "env": _Starter("uCS", "unset chdir split-string"),
    "nice": _Starter("n", "adjustment"),
    "ionice": _Starter("cnpPu", "class classdata"),
    "timeout": _Starter("ks", "kill-after signal", 1),
    "nohup": _Starter(),
    "setsid": _Starter(),
    "stdbuf": _Starter("ioe", "input output error"),
    "chrt": _Starter("TPD", "sched-runtime sched-period sched-deadline", 1),
    "taskset": _Starter(words=1),
    "numactl": _Starter("iNmCpPw", "interleave cpunodebind membind physcpubind preferred preferred-many weighted-interleave"),
    "time": _Starter("fo", "format output"),
    "tini": _Starter("pe"),
    "dumb-init": _Starter("r", "rewrite"),
}


def refuse(command: Sequence[str]) -> None:
    """Raise :class:`gpuckpt.errors.Usage` for a *command* that comes to a container's client, which is not the program."""
    client = client_in(command)
    if client:
        raise errors.Usage(
            f"{client} starts the program elsewhere: what runs here is only its client; nothing was started",
            hint=f"run gpuckpt inside: {client} … gpuckpt run -- COMMAND",
        )


def client_in(command: Sequence[str]) -> str:
    """The client that *command* comes to, as a person calls it; "" if it comes to none, or to what cannot be told before it runs."""
    words = list(command)
    while words:
        program = Path(words[0]).name
        if program in CLIENTS:
            return f"{program} compose" if words[1:2] == ["compose"] else program
        if program in _SHELLS:
            words = _of_shell(words[1:])
        elif program in _STARTERS:
            words = _behind(words[1:], _STARTERS[program], program)
        else:
            return ""
    return ""


def _behind(words: list[str], starter: _Starter, program: str) -> list[str]:
    """The command among the *words* that a starter is given."""
    words = list(words)
    while words and (words[0].startswith("-") or _ASSIGNMENT.match(words[0])):
        word = words.pop(0)
        if word == "--":
            break
        if word == "-" or not word.startswith("-"):
            continue
        option, sign, value = word[2:].partition("=")
        takes = option in starter.names.split()
        if not word.startswith("--"):  # letters together: the first that takes a value takes the rest of the word, or the next one
            at = next((n for n, letter in enumerate(word) if letter in starter.letters), 0)
            option, sign, value, takes = word[at], word[at + 1 :], word[at + 1 :], at > 0
        if takes and not sign and words:
            value = words.pop(0)
        if program == "env" and option in ("S", "split-string"):
            words = [*_split(value), *words]
    return words[starter.words :]


def _of_shell(words: list[str]) -> list[str]:
    """The last command of a ``sh -c 'SCRIPT'``, which the shell ends with. Of a file nothing is told."""
    at = next((n for n, w in enumerate(words) if re.fullmatch(r"-[a-z]*c[a-z]*", w)), len(words))
    script = words[at + 1 : at + 2]
    if not script or not all(w.startswith("-") for w in words[:at]):
        return []
    last: list[str] = []
    ended = False
    for word in _split(script[0], between=";&|()\n"):
        if word.strip(";&|()\n"):
            last = [word] if ended else [*last, word]
            ended = False
        else:
            ended = True
    while last and (last[0] in _BEGINS or _ASSIGNMENT.match(last[0])):
        last.pop(0)
    return last


def _split(text: str, between: str = "") -> list[str]:
    """*text* as a shell reads it, with what stands *between* commands; [] where that cannot be."""
    reader = shlex.shlex(text, posix=True, punctuation_chars=between)
    reader.whitespace = " \t\r" if between else " \t\r\n"
    reader.whitespace_split = True
    try:
        return list(reader)
    except ValueError:
        return []

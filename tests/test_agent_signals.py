"""Signals to a program that stands at its safe point, its memory away: heard when it goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, threading, time
import gpuckpt.agent
from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
from gpuckpt.model import Call
how, log = sys.argv[1], []
class Communicators:
    def sockets(self): return 0
    def obstacles(self): return []
    def __getattr__(self, name): return list
class Interrupt(BaseException): pass
def interrupt(*_): raise Interrupt
signal.signal(signal.SIGUSR1, interrupt)
class Memory:
    def describe(self): return {"kept_bytes": 1, "host_bytes": 1, "tags": []}
    def announce(self, offload): pass
    def offload(self):
        log.append("offload")
        if how == "here": signal.raise_signal(signal.SIGUSR1)
        return {"kept_bytes": 1}
    def onload(self): log.append("onload")
gpuckpt.agent.install(Communicators(), memory=Memory())
me, agents, over = processes.read(os.getpid()).id, Agents(), threading.Event()
over = threading.Event()
def ask(step):
    (asked,) = agents.start(step, [me], "raw", 20.0).values()
    while asked.outcome is None:
        asked.receive()
    return asked.outcome.ok
def control():
    assert ask(Call.QUIESCE)
    assert ask(Call.OFFLOAD)
    for _ in range(2):  # the first one ends the idle block
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        while signal.getsignal(signal.SIGUSR1) is interrupt:
            time.sleep(0.001)
        assert ask(Call.COMMS) and ask(Call.COMMS_RESUME)
    assert ask(Call.ONLOAD)
    log.append("unquiesce")
    assert ask(Call.UNQUIESCE)
    over.set()
controller = threading.Thread(target=control)
controller.start()
try:
    if how == "idle":
        with gpuckpt.agent.idle():
            over.wait(20)
    else:
        while not over.is_set():
            gpuckpt.agent.checkpoint_here()
except Interrupt:
    log.append("interrupted")
assert over.wait(20)
assert log == ["offload", "onload", "unquiesce", "interrupted"], log
assert signal.getsignal(signal.SIGUSR1) is interrupt
"""


@pytest.mark.parametrize("where", ["here", "idle"])
def test_what_a_handler_raises_waits_until_the_memory_is_back(where: str) -> None:
    """Ctrl-C in a suspended job's terminal: a program that catches it, to save what it has, must not find its pool asleep."""
    subprocess.run([sys.executable, "-c", PROGRAM, where], check=True, timeout=20)


SEVERAL = """
import signal
from gpuckpt.agent import signals
heard = []
def hear(number, _):
    heard.append(number)
    raise ValueError
signal.signal(signal.SIGUSR1, hear)
signal.signal(signal.SIGUSR2, hear)
try:
    with signals.deferred():
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(number)
        assert heard == []
except ValueError:
    assert heard == [signal.SIGUSR2, signal.SIGUSR1]
    heard.append("raised")
assert heard[-1] == "raised"
assert signal.getsignal(signal.SIGUSR1) is hear
"""


def test_each_is_heard_once_whatever_the_others_raise() -> None:
    subprocess.run([sys.executable, "-c", SEVERAL], check=True, timeout=20)

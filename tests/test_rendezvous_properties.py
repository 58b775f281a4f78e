"""Whatever goes wrong on whichever host: never is one host's part committed and another's given up, and all of it comes back.

The real operation, barrier, coordinator and record types on every host; machines, store and time in memory (``memory_hosts.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, currently_in_test_context, given, settings
from hypothesis import note as hypothesis_note
from hypothesis import strategies as st

from gpuckpt.model import State
from tests.memory_hosts import NEVER, Hosts, MemoryStore, Part, Trouble
from tests.memory_machine import Fault
from tests.memory_world import described
from tests.schedules import Proc

if TYPE_CHECKING:
    from collections.abc import Callable

AS_FOUND = (1, 5, 6, 124, 130)
AGENT, PLAIN = Proc(agent=True), Proc()


def note(text: str) -> None:
    (hypothesis_note if currently_in_test_context() else print)(text)


def states(hosts: Hosts) -> list[dict[int, State]]:
    return [h.player.states() for h in hosts.hosts]


def tell(hosts: Hosts, what: str) -> None:
    for h in hosts.hosts:
        records = [described(r) + f" {r.membership.phase if r.membership else ''}" for r in h.machine.counting()]
        note(f"{what} {h.number}: exit {h.code}, {h.error!r}, {h.player.states()}, {records}")


def check(
    parts: tuple[Part, ...],
    seed: int = 0,
    gone_at: int = NEVER,
    torn_at: int = NEVER,
    *,
    resume: bool = False,
    same_store: bool = False,
    spans: bool = False,
    at_the_end: Callable[[Hosts, MemoryStore], None] = lambda _, __: None,
) -> Hosts:
    """A suspend (or a resume, after one without trouble) with trouble; then what a person would type, without trouble.

    *at_the_end* is told of the hosts, and of the store that they had, before the last resume.
    """
    hosts = Hosts(parts, seed, spans=spans)
    if resume:
        hosts.calm()
        hosts.command("suspend")
        assert all(h.code == 0 for h in hosts.hosts), [h.error for h in hosts.hosts]
        for h in hosts.hosts:
            h.troubled = True
    hosts.store = MemoryStore(gone_at, torn_at)
    hosts.command("resume" if resume else "suspend")
    tell(hosts, "resume" if resume else "suspend")
    together(hosts, resume)
    if not (resume or spans):
        alone(hosts)
    dead = any(t.what == "die" for p in parts for t in p.troubles)
    hosts.calm()
    hosts.recover()
    tell(hosts, "recover")
    together(hosts, resume)
    at_the_end(hosts, hosts.store)
    if not same_store:
        hosts.store = MemoryStore()
    hosts.command("resume", timeout_s=20.0)
    tell(hosts, "resume")
    for h in hosts.hosts:
        lost = {p.pid for p in h.machine.rules.processes.values() if p.lost}
        assert lost <= h.machine.may_be_lost, "lost by gpuckpt"
        assert not h.machine.wrongs, h.machine.wrongs
        assert not h.machine.claims
        if not dead and not any(x.machine.may_be_lost for x in hosts.hosts):
            assert set(h.player.states().values()) == {State.RUNNING}, "it does not come back"
            assert not h.machine.counting(), "a record is left"
    return hosts


def together(hosts: Hosts, resume: bool) -> None:
    """Who says that all is as found, or that all is done, speaks for every host."""
    undone, done = (State.CHECKPOINTED, State.RUNNING) if resume else (State.RUNNING, State.CHECKPOINTED)
    everywhere = {s for here in states(hosts) for s in here.values()}
    if any(h.code in AS_FOUND for h in hosts.hosts):
        assert done not in everywhere or any(t.what == "die" for h in hosts.hosts for t in h.part.troubles), (
            "done on one, given up on another"
        )
    if any(h.code == 0 for h in hosts.hosts):
        assert undone not in everywhere, "done on one, not done on another"


def alone(hosts: Hosts) -> None:
    """A suspend that ends before this host's vote for the commit leaves nothing behind here, whatever happened to the others; but what was
    interrupted twice is left to itself."""
    for h in hosts.hosts:
        left = [r for r in h.machine.counting() if r.membership and r.membership.phase == "joined"]
        patient = [t.what for t in h.part.troubles] in ([], ["interrupt"])
        if h.code is not None and not h.part.faults and patient:
            assert not left, "what was not committed is held"


def troubles() -> st.SearchStrategy[tuple[Trouble, ...]]:
    one = st.builds(Trouble, st.integers(0, 110), st.sampled_from("crash crash kill-all interrupt interrupt".split()))
    return st.lists(one, max_size=2).map(tuple)


def faults() -> st.SearchStrategy[tuple[Fault, ...]]:
    one = st.builds(
        Fault, st.integers(0, 9), st.sampled_from([None, 0.5, 2.0, 500.0]), st.sampled_from(["", "", "UNKNOWN"]), st.booleans(), st.none()
    )
    return st.lists(one, max_size=1).map(tuple)


PARTS = st.builds(
    Part,
    st.sampled_from([(AGENT,), (AGENT, AGENT), (PLAIN,), (PLAIN, AGENT)]),
    troubles(),
    faults(),
    st.sampled_from([False] * 7 + [True]),
)
OFTEN_NEVER = st.sampled_from([NEVER, NEVER]) | st.integers(0, 150)


@pytest.mark.parametrize("resume", [False, True], ids=["suspend", "resume"])
def test_random_schedules(resume: bool) -> None:
    ran = 0

    @settings(max_examples=60, deadline=None, print_blob=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(PARTS, min_size=2, max_size=3).map(tuple), st.integers(0, 2**32), OFTEN_NEVER, OFTEN_NEVER, st.booleans(), st.booleans()
    )
    def one(parts: tuple[Part, ...], seed: int, gone_at: int, torn_at: int, same_store: bool, spans: bool) -> None:
        nonlocal ran
        ran += 1
        check(parts, seed, gone_at, torn_at, resume=resume, same_store=same_store, spans=spans)

    one()
    assert ran >= 60


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("resume", [False, True], ids=["suspend", "resume"])
def test_killed_at_every_point(who: int, resume: bool) -> None:
    """kill -9 of node 0, which counts the votes, and of another one, between any two steps."""
    for turn, point in enumerate(range(0, 170, 7)):
        parts = [Part(), Part()]
        parts[who] = Part(troubles=(Trouble(point, "crash"),))
        check(tuple(parts), resume=resume, spans=bool(turn % 2))


@pytest.mark.parametrize("gone_at", range(0, 70, 7))
def test_the_store_goes_at_every_point(gone_at: int) -> None:
    check((Part(), Part((PLAIN,))), gone_at=gone_at)
    check((Part(), Part()), torn_at=gone_at)

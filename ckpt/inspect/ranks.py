"""Whether the communicators of a group are wholly inside it: on one host, or over all hosts of an operation. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gpuckpt.model import Hazard, Outsider, Rank


def hazards(hosts: Mapping[str, Sequence[Rank]], outside: Sequence[Outsider] = ()) -> list[Hazard]:
    """A hazard for each communicator that has ranks elsewhere or twice, or ranks of different NCCL versions. *hosts*: name -> its ranks.
    *outside*: who has the ranks elsewhere, where that is known."""
    several = len(hosts) > 1
    found = []
    for (name, size), parts in sorted(_by_communicator(hosts).items()):
        everywhere = [(host, r) for host, ranks in parts.items() for r in ranks]
        found += _versions(name, everywhere, several)
        spread = [(host, r) for host, ranks in parts.items() if not _whole(ranks, size) for r in ranks]
        if not spread:
            continue
        host, first = spread[0]
        seen = Counter(r.rank for _, r in spread)
        missing = [r for r in range(size) if not seen[r]]
        twice = sorted(r for r, count in seen.items() if count > 1)
        of = f"communicator {name} of pid {first.pid}{f' on {host}' if several else ''}"
        if missing:
            seen_there = _elsewhere(name, size, missing, outside)
            where = "on none of these hosts" if several else "not in it"
            where = _named(seen_there) if seen_there else f"rank {_listed(missing)} of {size} is {where}, or has no agent"
            found.append(_hazard(f"{of} reaches outside of this group: {where}", _cure(several, seen_there), first.pid))
        elif twice and several:
            places = ", ".join(f"pid {r.pid} on {host}" for host, r in spread if r.rank == twice[0])
            found.append(
                _hazard(f"{of} has rank {twice[0]} twice: {places}", "give communicators of different jobs different names", first.pid)
            )
    return found


def span(hosts: Mapping[str, Sequence[Rank]]) -> bool:
    """Whether a communicator has ranks on several of *hosts*, or elsewhere."""
    return any(not _whole(ranks, size) for (_, size), parts in _by_communicator(hosts).items() for ranks in parts.values())


def _elsewhere(name: str, size: int, missing: Sequence[int], outside: Sequence[Outsider]) -> list[Outsider]:
    """Who of *outside* has the *missing* ranks: relatives where there are any, for others may have communicators of the same name."""
    found = [o for o in outside if (o.rank.communicator, o.rank.size) == (name, size) and o.rank.rank in missing]
    near = [o for o in found if o.near]
    return sorted(near or found, key=lambda o: (o.rank.rank, o.rank.pid))


def _named(elsewhere: Sequence[Outsider]) -> str:
    words = [f"rank {o.rank.rank} of {o.rank.size} is {o.who}" for o in elsewhere[:8]]
    return "; ".join([*words, *(["and more"] if len(elsewhere) > 8 else [])])


def _cure(several: bool, elsewhere: Sequence[Outsider]) -> str:
    if several and not elsewhere:
        return "name a process of the job on every host, and count every host in --nodes"
    if not elsewhere:
        return "name a process of the whole job, without --no-tree; for ranks on other hosts the same there, with --rendezvous"
    pids = list(dict.fromkeys(o.rank.pid for o in elsewhere))
    if not several and any(o.near for o in elsewhere):
        return f"suspend the whole job by any pid of it, without --no-tree: gpuckpt suspend {pids[0]}"
    taken = " ".join(f"--with {pid}" for pid in pids)
    there = " on its host" if several else ""
    return (
        f"{taken}{there} takes it through the suspend of its communicators alone: it stands still until the resume, its memory where it is"
    )


def bereft(ranks: Sequence[Rank]) -> dict[int, str]:
    """Of the *ranks* that are left of a group, whose peers have ended: pid -> which, in words. Of several communicators of one name, as
    data-parallel engines have, nobody knows whose peer it was."""
    found = {}
    for (name, size), parts in sorted(_by_communicator({"": ranks}).items()):
        here, seen = parts[""], {r.rank for r in parts[""]}
        if len(seen) == len(here) < size:
            missing = [r for r in range(size) if r not in seen]
            found.update({r.pid: f"rank {_listed(missing)} of its communicator {name} (rank {r.rank} of {size}) ended" for r in here})
    return found


def advice(ranks: Sequence[Rank]) -> list[str]:
    """What is known to go wrong with an NCCL that can suspend: one line for each version."""
    if not ranks:
        return []
    from gpuckpt.nccl import library  # ctypes, which most commands need not load

    pids: dict[str, set[int]] = {}
    for r in ranks:
        pids.setdefault(r.nccl, set()).add(r.pid)
    advised = ".".join(map(str, library.ADVISED))
    return [
        f"NCCL {version} in pid {', '.join(map(str, sorted(pids[version])))}: {advised} or newer is advised, "
        f"an older one deadlocks where one thread holds several ranks"
        for version in sorted(pids)
        if version and tuple(map(int, version.split("."))) < library.ADVISED
    ]


def _by_communicator(hosts: Mapping[str, Sequence[Rank]]) -> dict[tuple[str, int], dict[str, list[Rank]]]:
    found: dict[tuple[str, int], dict[str, list[Rank]]] = {}
    for host, ranks in hosts.items():
        for r in ranks:
            found.setdefault((r.communicator, r.size), {}).setdefault(host, []).append(r)
    return found


def _whole(ranks: Sequence[Rank], size: int) -> bool:
    """One host has all of it; or of several that share a name, as those of vLLM's data-parallel engines do."""
    counts = Counter(r.rank for r in ranks)
    return len(counts) == size and len(set(counts.values())) == 1


def _versions(name: str, everywhere: Sequence[tuple[str, Rank]], several: bool) -> list[Hazard]:
    by_version = {r.nccl: (host, r) for host, r in reversed(everywhere) if r.nccl}
    if len(by_version) < 2:
        return []
    named = ", ".join(
        f"{version} in pid {r.pid} (rank {r.rank}{f' on {host}' if several else ''})" for version, (host, r) in sorted(by_version.items())
    )
    pid = next(iter(by_version.values()))[1].pid
    return [_hazard(f"the ranks of communicator {name} have different versions of NCCL: {named}", "start the job with one of them", pid)]


def _hazard(message: str, hint: str, pid: int) -> Hazard:
    return Hazard("nccl-communicator", message, hint, pid)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))

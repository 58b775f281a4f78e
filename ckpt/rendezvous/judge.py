"""The verdict of a meeting: whether what all hosts have looked at may be operated on as a whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuckpt.inspect import ranks
from gpuckpt.model import Outsider, Rank

Body = dict[str, Any]


def name(info: Body) -> str:
    """What messages call a host."""
    return f"{info['host']} (node {info['node']})"


def suspend(infos: Mapping[int, Body]) -> Body:
    """Every communicator must be wholly on these hosts, and of one version of NCCL."""
    outside = [Outsider(Rank(*rank), who, near) for i in infos.values() for rank, who, near in i.get("outside", ())]
    found = ranks.hazards(_ranks(infos), outside)
    if found:
        return _refused("nccl-communicator", found[0].message, found[0].hint)
    return _go(infos, next((i["group"] for i in infos.values() if i["group"]), ""))


def resume(infos: Mapping[int, Body]) -> Body:
    """All that are not running must be of one group; and who knows nothing of it must not have had a part in it.

    A host that was never committed, or that has undone its part, forgets the group.
    """
    known = [i for i in infos.values() if i["group"] and not i["already"]]
    groups = {i["group"] for i in known}
    if len(groups) > 1:
        a, b = known[0], next(i for i in known if i["group"] != known[0]["group"])
        return _refused(
            "several-hosts",
            f"{name(a)} and {name(b)} would resume groups that were not suspended together; nothing was touched",
            "name processes of the same group on every host: gpuckpt status",
        )
    group = groups.pop() if groups else ""
    committed = any(i["committed"] for i in known)
    for i in infos.values():
        if group and i["group"] != group and (committed or group in i["journal"]):
            return _refused(
                "several-hosts",
                f"what was named on {name(i)} has no part in the group that {name(known[0])} would resume; nothing was touched",
                "name a process of the group on every host: gpuckpt status",
            )
    return _go(infos, group)


def _ranks(infos: Mapping[int, Body]) -> dict[str, list[Rank]]:
    return {name(i): [Rank(*r) for r in i["ranks"]] for i in infos.values()}


def _go(infos: Mapping[int, Body], group: str) -> Body:
    everybody = [infos[n] for n in sorted(infos)]
    return {
        "go": True,
        "hosts": [i["host"] for i in everybody],
        "group": group,
        "patience_s": max(i["patience_s"] for i in everybody),
        "spans": ranks.span(_ranks(infos)),
        "already": all(i["already"] for i in everybody),
    }


def _refused(code: str, message: str, hint: str) -> Body:
    return {"go": False, "held": False, "cause": {"code": code, "message": message, "hint": hint, "node": None}}

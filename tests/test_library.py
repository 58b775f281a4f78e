"""The package as a program uses it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import gpuckpt
from gpuckpt import errors

if TYPE_CHECKING:
    from tests.simulated_machine import Machine


@pytest.fixture
def here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine that calls of this very process are about."""
    for name in ("GPUCKPT_SIMULATE", "GPUCKPT_STATE_DIR"):
        monkeypatch.setenv(name, machine.environ[name])
    return machine


SENSELESS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (gpuckpt.suspend, (), {}, "no pid"),
    (gpuckpt.resume, (), {}, "no pid"),
    (gpuckpt.suspend, ("4242",), {}, "'4242' is not a pid"),
    (gpuckpt.suspend, ([4242],), {}, "is not a pid"),
    (gpuckpt.resume, (0,), {}, "0 is not a pid"),
    (gpuckpt.status, (-1,), {}, "-1 is not a pid"),
    (gpuckpt.suspend, (4242,), {"along": ["x"]}, "'x' is not a pid"),
    (gpuckpt.suspend, (4242,), {"method": "magic"}, "'magic' is not one of 'auto', 'driver', 'pool'"),
    (gpuckpt.suspend, (4242,), {"accept_loss": ["everything"]}, "'everything' is not one of 'possible-import', "),
    (gpuckpt.suspend, (4242,), {"accept_loss": "possible-import"}, "such as ['possible-import']"),
    (gpuckpt.suspend, (4242,), {"oom_score_adj": 1001}, "1001 is not in the range -1000<=x<=1000"),
    *(
        (
            call,
            (4242,) if call in (gpuckpt.suspend, gpuckpt.resume) else (),
            {"timeout_s": seconds},
            "a duration is greater than 0 and finite",
        )
        for call in (gpuckpt.suspend, gpuckpt.resume, gpuckpt.recover, gpuckpt.lease)
        for seconds in (0, -1.0, math.nan, math.inf, "30s")
    ),
    (gpuckpt.resume, (4242,), {"wait_s": math.nan}, "a duration is greater than 0 and finite"),
]


def test_an_argument_that_makes_no_sense(here: Machine) -> None:
    """Refused before anything is looked at: there is no pid 4242, and nobody asks."""
    for call, pids, options, words in SENSELESS:
        with pytest.raises(errors.Usage) as refused:
            call(*pids, **options)
        assert words in refused.value.message, (call.__name__, options)
    assert not here.state_dir.exists()


def test_the_same_words_as_the_command_line(machine: Machine) -> None:
    for option, given in (
        ("--method", {"method": "magic"}),
        ("--oom-score-adj", {"oom_score_adj": 1001}),
        ("--accept-loss", {"accept_loss": ["x"]}),
    ):
        (value,) = given.values()
        typed = machine.gpuckpt("suspend", 4242, option, value[0] if isinstance(value, list) else value).error["message"]
        with pytest.raises(errors.Usage) as refused:
            gpuckpt.suspend(4242, **given)
        assert refused.value.message.split(": ", 1)[1] in typed


def test_a_plan_and_what_came_of_it(here: Machine) -> None:
    target = here.target()
    options: dict[str, Any] = {"tree": False, "accept_loss": ["possible-import"]}  # our own other children may be related
    planned = gpuckpt.suspend(target.pid, dry_run=True, **options)
    assert planned.details["plan"] == {**here.gpuckpt("suspend", "--dry-run", target.pid).document["plan"]}
    assert here.records() == []
    assert not gpuckpt.is_suspended(target.pid)
    gpuckpt.suspend(target.pid, **options)
    assert gpuckpt.is_suspended(target.pid)
    assert gpuckpt.suspend(target.pid, dry_run=True, **options).already
    assert [s["name"] for s in gpuckpt.resume(target.pid, dry_run=True).details["plan"]["steps"]] == ["restore", "unlock"]
    assert gpuckpt.is_suspended(target.pid)
    gpuckpt.resume(target.pid)
    assert target.unharmed()
    with pytest.raises(errors.Usage):
        gpuckpt.suspend(target.pid, dry_run=True, rendezvous="file:///nowhere/job", nodes=2)

"""Data-parallel engines of a mixture-of-experts model, which step together: all stand still after the same step, or none does.

Their workers meet in every forward pass, so while one engine has work all step, the others with an empty batch. Such a *wave* ends when
nobody has work left: every so many steps (32; 16 in newer versions) the engines add it up. In the same sum each says whether its workers
have rung. It is the only thing that all engines learn at the same step; when all have rung all stand still there, whatever is in flight,
and the wave goes on after it. As long as one has not, the wave goes on as if somebody had work. So an engine whose workers have rung serves
its requests and steps along with the others until all have; one that nobody asks notices nothing; and a quiesce that is given up is no
longer in the next sum.

An idle engine starts a wave, as one that received a request does, and the coordinator wakes the others. Engines that vLLM's own call has
paused take no step until all of them resume, which they do together: each stands still by itself.

What it relies on in vLLM (0.26 to 0.33, of which none has run so), beside :mod:`gpuckpt.agent.vllm`: ``ParallelConfig.sync_dp_state`` is
that sum, made in a way that is known here, and called in one place of ``DPEngineCoreProc``; a number of unfinished requests above zero
means work; ``start_wave`` reaches the coordinator by ``output_queue``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuckpt.agent.bell import Bell

CORE, PARALLEL = "vllm.v1.engine.core", "vllm.config.parallel"
_NUMBERS = "[int(has_unfinished), int(pending_pause)], dtype=torch.int32"
#: What adds them up in the source of ``sync_dp_state`` -> the same, of the tensor that engines with gpuckpt send. All must do it alike,
#: those without gpuckpt too.
SUMS: dict[str, Callable[[Any, Any, Any, Any], object]] = {
    "torch.distributed.all_reduce(tensor, op=ReduceOp.SUM, group=dp_group)": lambda parallel, _, tensor, group: (
        parallel.torch.distributed.all_reduce(tensor, op=parallel.ReduceOp.SUM, group=group)
    ),
    "cpu_all_reduce_(tensor, dp_group, timeout=self.cpu_distributed_timeout)": lambda parallel, config, tensor, group: (
        parallel.cpu_all_reduce_(tensor, group, timeout=config.cpu_distributed_timeout)
    ),
}
_OF_AN_ENGINE = ("has_coordinator", "ignore_start_dp_wave", "engines_running", "current_wave", "output_queue")


def steps_together(engine: Any) -> bool:
    return hasattr(engine, "dp_group")


@dataclass(eq=False, slots=True)
class Together:
    """One engine of several. *hold* lets its workers stand still, and returns when none does any more."""

    engine: Any
    bell: Bell
    hold: Callable[[Any], None]
    add: Callable[[Any, Any, Any, Any], object] | None = None  # of SUMS, that of this vLLM

    def problem(self) -> str:
        """Why this engine cannot be held together with the others; "" if it can."""
        source = _source()
        self.add = next((add for words, add in SUMS.items() if words in source and _NUMBERS in source), None)
        if (
            self.add is None
            or not hasattr(sys.modules.get(CORE), "EngineCoreOutputs")
            or not all(hasattr(self.engine, name) for name in _OF_AN_ENGINE)
        ):
            return "this version of vLLM has other data-parallel engines than gpuckpt knows"
        if not self.engine.has_coordinator:
            return "the data-parallel engines of offline inference have no coordinator, by which one wakes the others"
        return ""

    def install(self) -> None:
        """Take part in the sum from now on."""
        cls = sys.modules[PARALLEL].ParallelConfig
        if isinstance(inspect.getattr_static(cls, "sync_dp_state"), staticmethod):
            cls.sync_dp_state = staticmethod(functools.partial(self.sync, None))
            return

        def sync_dp_state(config: Any, dp_group: Any, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
            return self.sync(config, dp_group, has_unfinished, pending_pause)

        cls.sync_dp_state = sync_dp_state

    def come(self) -> None:
        """Called when all workers have rung: see to it that a step comes at which the engines agree."""
        engine = self.engine
        if engine.engines_running or self.bell.all_rung() is None:
            return
        if engine.ignore_start_dp_wave:  # paused, and so are the others
            self.hold(engine)
            return
        engine.engines_running = True
        engine.output_queue.put_nowait((-1, sys.modules[CORE].EngineCoreOutputs(start_wave=engine.current_wave)))

    def sync(self, config: Any, dp_group: Any, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        """In the place of ``sync_dp_state``, with the same collective: whether any engine has work, and whether all are to pause.
        *config* is the ``ParallelConfig``, None in versions that do not say.

        Who has rung counts ``size + 1``: so the sum tells it apart from work, and to an engine without gpuckpt it is work.
        """
        parallel, size = sys.modules[PARALLEL], dp_group.size()
        torch = parallel.torch
        rung = self.bell.all_rung() is not None
        said = torch.tensor([int(has_unfinished) + (size + 1) * rung, int(pending_pause)], dtype=torch.int32, device="cpu")
        assert self.add is not None, "there is no problem with it"
        self.add(parallel, config, said, dp_group)
        have_rung, unfinished = divmod(said[0].item(), size + 1)
        pausing = said[1].item()
        if have_rung == size:
            self.hold(self.engine)
            have_rung = 0
        return unfinished + have_rung > 0 or pausing % size != 0, pausing == size


def _source() -> str:
    with contextlib.suppress(KeyError, AttributeError, OSError, TypeError):
        return inspect.getsource(sys.modules[PARALLEL].ParallelConfig.sync_dp_state)
    return ""


def refusals(parallel_config: Any) -> list[str]:
    """What a worker's *parallel_config* says that no engine could hold between two steps, with its cure."""
    found = []
    if getattr(parallel_config, "enable_elastic_ep", False):
        found.append("its data-parallel engines may come and go between two steps (start vLLM without --enable-elastic-ep)")
    elif getattr(parallel_config, "enable_eplb", False) and getattr(parallel_config.eplb_config, "use_async", False):
        cure = "start vLLM with --eplb-config.use_async=false"
        found.append(f"a thread of it moves experts between GPUs beside the steps, which its engine cannot hold ({cure})")
    if getattr(parallel_config, "enable_fault_tolerance", False):
        found.append(
            "its engines may replace a group of theirs between two steps (fault tolerance: start vLLM without --enable-fault-tolerance)"
        )
    return found

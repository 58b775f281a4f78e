"""What a run tells Prometheus about itself. Names and labels are an interface: ``docs/vllm.md`` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from gpuckpt.model import Report
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.state import Run

if TYPE_CHECKING:
    from gpuckpt.errors import GpuckptError

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class Metrics:
    """The metrics of one run."""

    def __init__(self, run: Run) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a line more for each, which nobody reads
        self.registry = CollectorRegistry()
        self._state = Gauge("gpuckpt_state", "1 for the state that the run is in", ["state"], registry=self.registry)
        self._seconds = Histogram(
            "gpuckpt_operation_seconds", "Time by step; whole is all of it", ["operation", "step"], buckets=BUCKETS, registry=self.registry
        )
        self._operations = Counter(
            "gpuckpt_operations", "Suspends and resumes by outcome", ["operation", "outcome"], registry=self.registry
        )
        self._resumes = Counter("gpuckpt_resumes", "Resumes that were done, by who asked", ["reason"], registry=self.registry)
        host = Gauge("gpuckpt_host_bytes", "Host memory that holds what was on the GPUs", registry=self.registry)
        host.set_function(lambda: run.holdings.host_bytes)
        self._gpu = Gauge("gpuckpt_gpu_bytes", "What it holds on each GPU; as it was last seen awake", ["gpu"], registry=self.registry)
        self._run = run
        waiting = Gauge("gpuckpt_requests_waiting", "Requests that are held", registry=self.registry)
        waiting.set_function(lambda: run.traffic.waiting)
        running = Gauge("gpuckpt_requests_running", "Requests that the server works on", registry=self.registry)
        running.set_function(lambda: run.traffic.running)
        self.answered = Counter("gpuckpt_refused_requests", "Requests that the gate answered itself", ["code"], registry=self.registry)
        self._entered(run.state)
        run.changed.append(self._entered)
        run.finished.append(self._finished)

    def text(self) -> bytes:
        here = self._run.state in (RunState.STARTING, RunState.AWAKE, RunState.DRAINING)
        for uuid, nbytes in self._run.holdings.gpu_bytes.items():
            self._gpu.labels(uuid).set(nbytes if here else 0)
        return bytes(generate_latest(self.registry))

    def _entered(self, state: RunState) -> None:
        for each in RunState:
            self._state.labels(each.value).set(each is state)

    def _finished(self, operation: str, reason: str, outcome: Report | GpuckptError, seconds: float) -> None:
        ok = isinstance(outcome, Report)
        self._operations.labels(operation, "done" if ok else getattr(outcome, "code", "failed")).inc()
        if not isinstance(outcome, Report):
            return
        self._seconds.labels(operation, "whole").observe(seconds)
        for step in outcome.steps:
            self._seconds.labels(operation, step.name).observe(step.seconds)
        if operation == "resume":
            self._resumes.labels(reason).inc()

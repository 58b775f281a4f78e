"""What the doctor says of permissions, containers and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuckpt import doctor
from gpuckpt.model import GIB
from tests.machines import DOCKER_CAPS, GPU0, ROOT_CAPS, Machine, meminfo

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_mps(machine: Machine) -> None:
    machine.lay({"proc/88/comm": "nvidia-cuda-mps\n"})
    line = machine.line("MPS")
    assert line.status == "problem"
    assert "pid 88" in line.message


@pytest.mark.parametrize(
    ("uid", "caps", "yama", "status", "said"),
    [
        (0, ROOT_CAPS, "1", "ok", "every user"),
        (0, ROOT_CAPS, "3", "warning", "ptrace_scope is 3"),
        (0, DOCKER_CAPS, None, "warning", "without CAP_SYS_PTRACE"),
        (1000, "0000000000080000", "2", "ok", "uid 1000 with CAP_SYS_PTRACE"),
        (1000, "0", "0", "warning", "at most processes of uid 1000"),
        (1000, "0", "1", "warning", "its own descendants"),
        (1000, "0", "2", "warning", "nothing without CAP_SYS_PTRACE"),
    ],
)
def test_permission(machine: Machine, uid: int, caps: str, yama: str | None, status: str, said: str) -> None:
    machine.lay({"proc/self/status": f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{caps}\n"})
    if yama:
        machine.lay({"proc/sys/kernel/yama/ptrace_scope": yama + "\n"})
    line = machine.line("permission")
    assert line.status == status
    assert said in line.message


def test_own_pid_namespace(machine: Machine) -> None:
    machine.pid_namespace()
    machine.process(70, 1)
    machine.process(71, 1)
    machine.devices.foreign = {71}  # there is a process 71 here, but it is not the one that the driver means
    machine.devices.answers["processes"][4711] = {GPU0.uuid: GIB}
    line = machine.line("container")
    assert line.status == "warning"
    assert "2 of the processes that it lists are not here" in line.message


def test_hidepid_matters_without_privilege(machine: Machine) -> None:
    machine.lay({"proc/mounts": "proc /proc proc rw,hidepid=invisible 0 0\n"})
    assert machine.line("container").status == "ok"
    machine.lay({"proc/self/status": "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0\n"})
    assert machine.line("hidepid").status == "warning"


def test_process_that_its_cgroup_cannot_hold(machine: Machine) -> None:
    machine.process(70, 44, "VLLM::Worker", cgroup="0::/docker/x\n")
    machine.lay({"sys/fs/cgroup/docker/x/memory.max": 20 * GIB, "sys/fs/cgroup/docker/x/memory.current": 4 * GIB})
    problem = machine.lines("host memory")[0]
    assert problem.status == "problem"
    assert "70 (VLLM::Worker) holds 44.0 GiB on its GPUs, but may take only 16.0 GiB" in problem.message
    assert "memory.max of /docker/x" in problem.message
    assert "46 GiB" in problem.fix


def test_memory_high_is_a_limit_too(machine: Machine) -> None:
    machine.process(70, 44, cgroup="0::/a\n")
    machine.lay({"sys/fs/cgroup/a/memory.high": 20 * GIB, "sys/fs/cgroup/a/memory.current": 0})
    assert "memory.high of /a" in machine.lines("host memory")[0].message


def test_not_all_at_once(machine: Machine) -> None:
    machine.lay({"proc/meminfo": meminfo(500, 50)})
    machine.process(70, 40)
    machine.process(71, 30)
    line = machine.line("host memory")
    assert line.status == "warning"
    assert "not all of them can be suspended at once" in line.message


def test_more_gpu_memory_than_ram(machine: Machine) -> None:
    machine.lay({"proc/meminfo": meminfo(64, 60)})
    assert machine.line("host memory").status == "warning"


def test_bytes_that_the_driver_does_not_tell(machine: Machine) -> None:
    machine.process(70, None)
    assert any("does not tell how much 70 (python3) holds" in c.message for c in machine.lines("host memory"))


def kubernetes(machine: Machine, **files: object) -> None:
    """A pod, seen from inside: its own cgroup is the root."""
    (machine.root / "proc/1").mkdir(exist_ok=True)
    machine.lay({"proc/1/environ": "PATH=/bin\0KUBERNETES_SERVICE_HOST=10.96.0.1\0", "proc/self/cgroup": "0::/\n"})
    files.setdefault("current", GIB)
    machine.lay({f"sys/fs/cgroup/memory.{name}": text for name, text in files.items()})


def test_pod_without_limit_and_with_a_small_request(machine: Machine) -> None:
    """Case 38: defilantech/LLMKube#1724, k8spatterns/examples#12."""
    kubernetes(machine, max="max", low=8 * GIB)
    machine.process(70, 44.5, rss_gib=3, cgroup="0::/\n")
    line = machine.line("pod memory")
    assert line.status == "warning"
    assert "no memory limit, and a request of 8.0 GiB" in line.message
    assert "Put 48Gi into the pod's memory request and limit (44.5 GiB now on the GPUs and 3.0 GiB resident)" in line.message
    assert line.fix == 'resources: {requests: {memory: "48Gi"}, limits: {memory: "48Gi"}}'


def test_pod_limits(machine: Machine) -> None:
    machine.process(70, 40, rss_gib=2, cgroup="0::/\n")
    kubernetes(machine, max=41 * GIB)
    assert machine.line("pod memory").status == "problem"
    kubernetes(machine, max=50 * GIB, min=20 * GIB)
    assert machine.line("pod memory").status == "warning"
    kubernetes(machine, max=50 * GIB, min=45 * GIB)
    assert machine.line("pod memory").status == "ok"
    kubernetes(machine, max=50 * GIB, min=0)
    assert "the request cannot be seen" in machine.line("pod memory").message


def test_idle_pod_gets_the_upper_bound(machine: Machine) -> None:
    kubernetes(machine, max=50 * GIB)
    line = machine.line("pod memory")
    assert line.status == "problem"
    assert "Put 140Gi" in line.message


def test_pods_seen_from_their_node(machine: Machine) -> None:
    kubernetes(machine)
    for pid, pod in ((70, "/kubepods/a/c1"), (71, "/kubepods/b/c2")):
        machine.process(pid, 20, cgroup=f"0::{pod}\n")
        machine.lay({f"sys/fs/cgroup{pod}/memory.max": 30 * GIB, f"sys/fs/cgroup{pod}/memory.current": GIB})
    machine.lay({"sys/fs/cgroup/kubepods/memory.max": 400 * GIB, "sys/fs/cgroup/kubepods/memory.current": GIB})
    assert [c.message.partition(":")[0] for c in machine.lines("pod memory")] == ["/kubepods/a/c1", "/kubepods/b/c2"]


def test_no_pod_line_outside_kubernetes(machine: Machine) -> None:
    assert machine.lines("pod memory") == []


def test_earlyoom(machine: Machine) -> None:
    machine.process(70, 1, oom_score=901, oom_score_adj=0)
    machine.lay({"proc/9/comm": "earlyoom\n"})
    line = machine.line("memory killers")
    assert line.status == "warning"
    assert "70 (python3) 901" in line.message
    assert "--avoid" in line.fix


def test_systemd_oomd(machine: Machine) -> None:
    machine.lay({"proc/9/comm": "systemd-oomd\n"})
    assert "ManagedOOMPreference" in machine.line("memory killers").fix


@pytest.mark.parametrize(("gib", "count", "status", "said"), [(26, 1, "problem", "96%"), (15, 2, "warning", "100%"), (10, 2, "ok", "90%")])
def test_ray_monitor(machine: Machine, gib: float, count: int, status: str, said: str) -> None:
    machine.lay({"proc/meminfo": meminfo(100, 30)})
    machine.lay({"proc/50/comm": "raylet\n", "proc/50/stat": "50 (raylet) S 1 1", "proc/50/environ": "RAY_memory_usage_threshold=0.95\0"})
    for pid in range(70, 70 + count):
        machine.process(pid, gib, ppid=50)
    line = machine.line("Ray")
    assert line.status == status
    for words in ("raylet 50", "95%", "70% are in use", said, "RAY_memory_usage_threshold"):
        assert words in line.message


def test_ray_that_no_threshold_helps(machine: Machine) -> None:
    machine.lay({"proc/meminfo": meminfo(100, 30), "proc/50/comm": "raylet\n", "proc/50/stat": "50 (raylet) S 1 1"})
    machine.process(70, 44, ppid=50)
    assert "no threshold makes room" in machine.line("Ray").fix


def test_huge_pages(machine: Machine) -> None:
    line = machine.line("huge pages")
    assert "measured now: 2.0 GiB/s with 4 KiB pages, 7.0 GiB/s" in line.message
    machine.lay({"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"})
    assert machine.line("huge pages").status == "warning"
    machine.lay({"proc/meminfo": meminfo(500, 0.5)})
    assert "not measured" in machine.line("huge pages").message


def test_fault_rates_are_measured() -> None:
    rates = doctor.measure_fault_rates(8 << 20)
    assert rates.small_pages > 0
    assert rates.huge_pages > 0

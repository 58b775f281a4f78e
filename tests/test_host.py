"""Host memory read from machines laid out in a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuckpt import host_room
from gpuckpt.inspect import host
from gpuckpt.model import GIB, Gpu, GpuBytes, GpuProcess, HostRoom, Movable, ProcessId, State

if TYPE_CHECKING:
    from pathlib import Path

KB_A_GIB = GIB // 1024
UNLIMITED_V1 = "9223372036854771712"


def lay(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def meminfo(total_gib: float, available_gib: float) -> str:
    total, available = int(total_gib * KB_A_GIB), int(available_gib * KB_A_GIB)
    return f"MemTotal:       {total} kB\nMemFree: 1 kB\nMemAvailable:   {available} kB\nHugePages_Total: 3"


def v2(root: Path, path: str, mount: str = "sys/fs/cgroup", **files: object) -> None:
    """A version 2 cgroup: ``max=…`` makes memory.max, and so on."""
    files.setdefault("current", 0)
    lay(root, {f"{mount}{path}/memory.{name}": text for name, text in files.items()})


def test_mem_available_binds(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 10), "proc/7/cgroup": "0::/a"})
    v2(tmp_path, "/a", max=60 * GIB, current=GIB)
    assert host.host_room(7, tmp_path) == HostRoom(10 * GIB, "MemAvailable")


@pytest.mark.parametrize(
    ("tight", "limit"), [("/kubepods/x/c", "memory.max of /kubepods/x/c"), ("/kubepods", "memory.max of /kubepods"), ("/kubepods/x", None)]
)
def test_the_tightest_of_several_levels(tmp_path: Path, tight: str, limit: str | None) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 50), "proc/7/cgroup": "0::/kubepods/x/c"})
    for path in ("/kubepods/x/c", "/kubepods/x", "/kubepods"):
        v2(tmp_path, path, max=5 * GIB if path == tight else "max", current=GIB, high="max")
    assert host.host_room(7, tmp_path) == HostRoom(4 * GIB, limit or "memory.max of /kubepods/x")


def test_memory_high_binds(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 50), "proc/7/cgroup": "0::/a"})
    v2(tmp_path, "/a", max=20 * GIB, high=8 * GIB, current=6 * GIB)
    assert host.host_room(7, tmp_path) == HostRoom(2 * GIB, "memory.high of /a")


def test_file_cache_counts_as_free(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 50), "proc/7/cgroup": "0::/a"})
    v2(tmp_path, "/a", max=8 * GIB, current=7 * GIB, stat=f"anon 5\nfile 9\ninactive_file {3 * GIB}\nactive_file 0")
    assert host.host_room(7, tmp_path) == HostRoom(4 * GIB, "memory.max of /a")


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 50), "proc/7/cgroup": "0::/a"})
    v2(tmp_path, "/a", max=GIB, current=2 * GIB)
    assert host.host_room(7, tmp_path).available_bytes == 0


def test_container_in_a_cgroup_namespace(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 50), "proc/self/cgroup": "0::/"})
    v2(tmp_path, "", max=4 * GIB, current=GIB)
    assert host.host_room("self", tmp_path) == HostRoom(3 * GIB, "memory.max of /")


def test_process_outside_our_cgroup_namespace(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 50), "proc/7/cgroup": "0::/../other"})
    v2(tmp_path, "", max=4 * GIB)
    v2(tmp_path, "/other", max=GIB)
    assert host.host_room(7, tmp_path) == HostRoom(50 * GIB, "MemAvailable")


def v1(root: Path, path: str, limit: object, usage: int, cache: int = 0) -> None:
    mount = f"sys/fs/cgroup/memory{path}/memory"
    stat = f"inactive_file 1\ntotal_inactive_file {cache}"
    lay(root, {f"{mount}.limit_in_bytes": limit, f"{mount}.usage_in_bytes": usage, f"{mount}.stat": stat})


def test_version_1_nested(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 50), "proc/7/cgroup": "5:cpu,memory:/a/b\n1:cpuset:/elsewhere\n0::/"})
    v1(tmp_path, "", UNLIMITED_V1, 9 * GIB)
    v1(tmp_path, "/a", 10 * GIB, 8 * GIB, cache=GIB)
    v1(tmp_path, "/a/b", UNLIMITED_V1, 8 * GIB)
    assert host.host_room(7, tmp_path) == HostRoom(3 * GIB, "memory.limit_in_bytes of /a")


def test_version_1_container_with_host_paths(tmp_path: Path) -> None:
    """Docker: /proc gives the host's path, the mount shows the container's subtree."""
    lay(
        tmp_path,
        {
            "proc/meminfo": meminfo(64, 50),
            "proc/7/cgroup": "5:memory:/docker/abc/sub",
            "proc/self/mountinfo": "36 30 0:31 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory",
        },
    )
    v1(tmp_path, "", 10 * GIB, GIB)
    v1(tmp_path, "/sub", 3 * GIB, GIB)
    assert host.host_room(7, tmp_path) == HostRoom(2 * GIB, "memory.limit_in_bytes of /sub")
    (tmp_path / "proc/self/mountinfo").unlink()
    assert host.host_room(7, tmp_path) == HostRoom(9 * GIB, "memory.limit_in_bytes of /")


def test_version_2_beside_version_1(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": meminfo(64, 50), "proc/7/cgroup": "3:cpuset:/\n0::/a"})
    v2(tmp_path, "/a", "sys/fs/cgroup/unified", max=2 * GIB)
    assert host.host_room(7, tmp_path) == HostRoom(2 * GIB, "memory.max of /a")


def test_what_nvml_does_not_tell_is_not_nothing(tmp_path: Path) -> None:
    """In a pid namespace it may list nobody that is there, and with vGPU or MIG no bytes: at most it is all that is used on the GPUs."""
    lay(tmp_path, {"proc/meminfo": meminfo(128, 64)})
    gpus = (Gpu("GPU-a", 0, "", 80 * GIB, 0), Gpu("GPU-b", 1, "", 80 * GIB, 40 * GIB))

    def looked(*held: tuple[GpuBytes, ...], method: str = "driver") -> tuple[float, list[str]]:
        members = [GpuProcess(ProcessId(n, 1), "serve", 0, State.RUNNING, on, 0, False) for n, on in enumerate(held, 7)]
        needed, _, short = host_room.for_images(members, method, tmp_path, lambda: gpus)
        return needed / GIB, [h.message for h in short]

    (needed, said) = looked((GpuBytes("GPU-a", None),))
    assert 80 < needed < 83
    assert "up to" in said[0]
    assert "pid 7" in said[0]
    assert looked((GpuBytes("GPU-b", None),))[1] == []
    assert looked((GpuBytes("GPU-b", 30 * GIB),), (GpuBytes("GPU-b", None),))[0] < 43, "30 of them are known"
    assert looked((GpuBytes("GPU-a", None),), method="pool")[0] < 1
    assert looked(())[0] < 1, "who is not listed holds nothing"
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532210]")
    assert looked(())[0] > 120, "but for a container"
    server = GpuProcess(ProcessId(7, 1), "serve", 0, State.RUNNING, (), 0, False, movable=Movable(4 * GIB, 110 * GIB))
    by_method = {m: host_room.for_images([server], m, tmp_path, lambda: gpus)[0] / GIB for m in ("driver", "auto")}
    assert by_method["driver"] > 120
    assert by_method["auto"] < 15, "what is dropped takes none"


def test_nothing_can_be_read(tmp_path: Path) -> None:
    room = host.host_room(7, tmp_path)
    assert room.available_bytes == 0
    assert room.limit.startswith("unknown")


def test_this_machine() -> None:
    room = host.host_room("self")
    assert room.available_bytes > 0
    assert room.limit == "MemAvailable" or " of /" in room.limit


def worker_under_raylet(root: Path, raylet_env: str = "", worker_env: str = "") -> None:
    lay(
        root,
        {
            "proc/meminfo": meminfo(100, 30),
            "proc/1/stat": "1 (init) S 0 1",
            "proc/50/stat": "50 (raylet) S 1 50",
            "proc/50/comm": "raylet",
            "proc/60/stat": "60 (sh (odd) name) S 50 60",
            "proc/60/comm": "sh",
            "proc/70/stat": "70 (python3) S 60 70",
            "proc/70/comm": "python3",
        },
    )
    (root / "proc/50/environ").write_bytes(raylet_env.encode())
    (root / "proc/70/environ").write_bytes(worker_env.encode())


def test_ray_kills_at_96_percent(tmp_path: Path) -> None:
    worker_under_raylet(tmp_path, "PATH=/bin\0RAY_memory_usage_threshold=0.95\0")
    limit = host.ray_monitor(70, tmp_path)
    assert limit is not None
    assert (limit.pid, limit.threshold) == (50, 0.95)
    assert limit.usage() == pytest.approx(0.70)
    assert limit.usage(26 * GIB) == pytest.approx(0.96)
    assert limit.would_kill(26 * GIB)
    assert not limit.would_kill(24 * GIB)


@pytest.mark.parametrize(
    ("raylet_env", "worker_env", "threshold"),
    [
        ("", "", 0.95),
        ("RAY_memory_usage_threshold=0.8\0", "RAY_memory_usage_threshold=0.5\0", 0.8),
        ("", "RAY_memory_usage_threshold=0.5\0", 0.5),
        ("RAY_memory_usage_threshold=often\0", "", 0.95),
    ],
)
def test_ray_threshold(tmp_path: Path, raylet_env: str, worker_env: str, threshold: float) -> None:
    worker_under_raylet(tmp_path, raylet_env, worker_env)
    limit = host.ray_monitor(70, tmp_path)
    assert limit is not None
    assert limit.threshold == threshold


def test_ray_least_free_bytes_raise_the_threshold(tmp_path: Path) -> None:
    worker_under_raylet(tmp_path, f"RAY_memory_usage_threshold=0.5\0RAY_min_memory_free_bytes={5 * GIB}\0")
    limit = host.ray_monitor(70, tmp_path)
    assert limit is not None
    assert limit.threshold_bytes == 95 * GIB


def test_ray_in_a_smaller_cgroup(tmp_path: Path) -> None:
    worker_under_raylet(tmp_path)
    lay(tmp_path, {"proc/50/cgroup": "0::/pod"})
    v2(tmp_path, "/pod", max=20 * GIB, current=16 * GIB, stat=f"inactive_file {GIB}")
    limit = host.ray_monitor(70, tmp_path)
    assert limit is not None
    assert (limit.used_bytes, limit.total_bytes) == (15 * GIB, 20 * GIB)


def test_no_ray(tmp_path: Path) -> None:
    worker_under_raylet(tmp_path, "RAY_memory_monitor_refresh_ms=0\0")
    assert host.ray_monitor(70, tmp_path) is None
    lay(tmp_path, {"proc/50/comm": "bash"})
    assert host.ray_monitor(70, tmp_path) is None
    assert host.ray_monitor(4711, tmp_path) is None


def test_memory_killers(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/9/comm": "earlyoom", "proc/12/comm": "systemd-oomd", "proc/13/comm": "bash", "proc/sys/kernel/x": "1"})
    assert host.memory_killers(tmp_path) == (host.MemoryKiller(9, "earlyoom"), host.MemoryKiller(12, "systemd-oomd"))
    assert host.memory_killers(tmp_path / "nowhere") == ()


def test_oom_score(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/9/oom_score": 740, "proc/9/oom_score_adj": -100})
    assert host.oom_score(9, tmp_path) == host.OomScore(740, -100)
    assert host.oom_score(10, tmp_path) is None


@pytest.mark.parametrize(("text", "setting"), [("always [madvise] never", "madvise"), ("[always] madvise never", "always"), (None, "")])
def test_thp(tmp_path: Path, text: str | None, setting: str) -> None:
    if text:
        lay(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert host.thp(tmp_path) == setting


def test_namespaces_and_containers(tmp_path: Path) -> None:
    assert not host.in_container(tmp_path)
    namespaces = tmp_path / "proc/self/ns"
    namespaces.mkdir(parents=True)
    (namespaces / "pid").symlink_to(host.HOST_PID_NAMESPACE)
    assert host.pid_namespace_is_host(tmp_path)
    assert not host.in_container(tmp_path)
    (namespaces / "pid").unlink()
    (namespaces / "pid").symlink_to("pid:[4026532210]")
    assert not host.pid_namespace_is_host(tmp_path)
    assert host.in_container(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".dockerenv", ""),
        ("run/.containerenv", ""),
        ("proc/1/environ", "A=1\0container=podman\0"),
        ("proc/1/environ", "KUBERNETES_SERVICE_HOST=1"),
    ],
)
def test_marks_of_a_container(tmp_path: Path, name: str, text: str) -> None:
    lay(tmp_path, {name: text})
    assert host.in_container(tmp_path)


@pytest.mark.parametrize(
    ("options", "value"), [("rw,nosuid,hidepid=invisible", "invisible"), ("rw,hidepid=2", "2"), ("rw", ""), ("rw,hidepid=0", "")]
)
def test_hidepid(tmp_path: Path, options: str, value: str) -> None:
    lay(tmp_path, {"proc/mounts": f"sysfs /sys sysfs rw 0 0\nproc /proc proc {options} 0 0"})
    assert host.hidepid(tmp_path) == value

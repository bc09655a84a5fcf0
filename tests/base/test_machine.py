"""What a process has of its machine: memory, by trees of files as Linux shows them, and devices."""

from pathlib import Path

import pytest
import torch

from saecli.base import machine, processes
from saecli.base.devices import device_named
from saecli.base.errors import ConfigError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the files of control groups, and what /proc says of this process."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")

    def write(own: str, files: dict[str, object]) -> None:
        (tmp_path / "own").write_text(own)
        for name, value in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    return write


def test_without_limits_it_is_the_machines(tree):
    free = machine.available_memory()
    assert free > 0
    tree("0::/user.slice\n", {"user.slice/memory.max": "max", "user.slice/memory.current": 1 << 60})
    assert machine.available_memory() > free / 2  # other processes take some meanwhile


def test_the_least_of_nested_limits_counts_without_page_cache(tree):
    """A SLURM job's step: its own group has no limit, the job's has."""
    job = "system.slice/slurmstepd.scope/job_7"
    tree(
        f"0::/{job}/step_0/user\n",
        {
            f"{job}/step_0/user/memory.max": "max",
            f"{job}/step_0/user/memory.current": 300 << 20,
            f"{job}/memory.max": 2 << 20,
            f"{job}/memory.current": (1 << 20) + 1000,
            f"{job}/memory.stat": f"anon 5\nactive_file {1 << 18}\ninactive_file {1 << 19}\nfile 1",
            "system.slice/memory.max": 1 << 40,
            "system.slice/memory.current": 1 << 39,
        },
    )
    assert machine.available_memory() == (1 << 20) - 1000 + (1 << 18) + (1 << 19)


@pytest.mark.parametrize("folder", ["docker/1", ""])
def test_limits_of_version_1_count(tree, folder):
    """`folder`: of the group, or in a container that sees its own group as the root."""
    group = f"memory/{folder}".rstrip("/")
    stat = f"active_file 7\ntotal_active_file {1 << 18}\ntotal_inactive_file {1 << 19}"
    own = "12:cpu,cpuacct:/docker/1\n9:memory:/docker/1\n1:name=systemd:/docker/1\n0::/x\n"
    tree(
        own,
        {
            f"{group}/memory.limit_in_bytes": 2 << 20,
            f"{group}/memory.usage_in_bytes": (1 << 20) + 1000,
            f"{group}/memory.stat": stat,
            "cpu/docker/1/memory.limit_in_bytes": 5,
        },
    )
    assert machine.available_memory() == (1 << 20) - 1000 + (1 << 18) + (1 << 19)
    tree(own, {f"{group}/memory.limit_in_bytes": 9223372036854771712})
    assert machine.available_memory() > 2 << 20


def test_a_kernel_that_does_not_say_what_is_available(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "none")
    machine.MEMINFO.write_text("MemTotal:  900 kB\nMemFree:  100 kB\nCached:   30 kB\n")
    assert machine.available_memory() == 130 * 1024
    machine.MEMINFO.write_text("MemFree:  100 kB\nMemAvailable:  200 kB\nCached:   30 kB\n")
    assert machine.available_memory() == 200 * 1024


def test_a_group_over_its_limit_has_nothing_left(tree):
    tree("0::/a\n", {"a/memory.max": 100, "a/memory.current": 200, "a/memory.stat": ""})
    assert machine.available_memory() == 0


def test_more_processes_than_gpus_compute_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in (*processes.LAUNCHED, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    assert device_named("cpu") == torch.device("cpu")
    said = r"no GPU for each of the 3 processes of this machine: .*--device cpu"
    for name in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=said):
            device_named(name)

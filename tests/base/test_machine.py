"""What a process has of its machine: memory, by trees of files as Linux shows them, devices; whom its warnings name."""

from pathlib import Path

import pytest
import torch

from saecli.base import machine
from saecli.base.console import Silent
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
    assert machine.available_memory() == pytest.approx(free, rel=0.2)


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


@pytest.mark.parametrize("seen_as", ["/docker/0a1b", "/"])
def test_a_container_of_version_1_that_sees_its_group_as_the_root(tree, seen_as: str):
    tree(
        f"11:cpuset:{seen_as}\n4:cpu,memory:{seen_as}\n1:name=systemd:{seen_as}\n0::/\n",
        {
            "memory/memory.limit_in_bytes": 3 << 20,
            "memory/memory.usage_in_bytes": 2 << 20,
            "memory/memory.stat": "active_file 7\ntotal_active_file 100\ntotal_inactive_file 30",
        },
    )
    assert machine.available_memory() == (1 << 20) + 130


def test_a_group_over_its_limit_has_nothing_left(tree):
    tree("0::/a\n", {"a/memory.max": 100, "a/memory.current": 200})
    assert machine.available_memory() == 0


def test_more_processes_than_gpus_compute_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in (*machine.LAUNCHED, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    assert device_named("cpu") == torch.device("cpu")
    said = r"no GPU for each of the 3 processes of this machine: .*--device cpu"
    for name in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=said):
            device_named(name)


@pytest.mark.parametrize("name", ["__main__", "saecli_runs", "saecli_runs.sweep", "thesis"])
def test_a_warning_names_the_line_of_the_caller_whatever_its_module_is_called(name: str):
    script = {"__name__": name}
    exec(compile("def call(warn):\n    warn('few rows')", "caller.py", "exec"), script)
    inside = {"__name__": "saecli.train.fit", "silent": Silent()}
    exec(compile("def warn(text): silent.warn(text)", "inside.py", "exec"), inside)
    with pytest.warns(UserWarning, match="few rows") as caught:
        script["call"](inside["warn"])
    assert (caught[0].filename, caught[0].lineno) == ("caller.py", 2)

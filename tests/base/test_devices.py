"""Devices of several processes of one machine, for which torch's counts stand in."""

import pytest
import torch

from saecli.base import machine
from saecli.base.devices import device_named
from saecli.base.errors import ConfigError


@pytest.fixture
def three_processes_of_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in (*machine.LAUNCHED, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_more_processes_than_gpus_are_refused(three_processes_of_two_gpus, name: str):
    with pytest.raises(ConfigError, match=r"3 processes on a machine of 2 GPUs: .*--device cpu"):
        device_named(name)


def test_they_may_compute_on_the_cpu(three_processes_of_two_gpus):
    assert device_named("cpu") == torch.device("cpu")

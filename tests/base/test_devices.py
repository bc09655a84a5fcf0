"""Devices of several processes of one machine, for which torch's counts stand in."""

import pytest
import torch

from saecli.base import machine
from saecli.base.devices import device_named
from saecli.base.errors import ConfigError


def test_more_processes_than_gpus_compute_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in (*machine.LAUNCHED, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    assert device_named("cpu") == torch.device("cpu")
    for name in ("auto", "cuda"):
        with pytest.raises(
            ConfigError, match=r"3 processes on a machine of 2 GPUs: .*--device cpu"
        ):
            device_named(name)

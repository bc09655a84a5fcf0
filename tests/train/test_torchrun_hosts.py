"""Two hosts: network namespaces joined by one cable, a launcher in each, as torchrun is used beyond one machine."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from homes import CommandLine, make_store
from launching import Launched, launched, own_words, torchrun
from test_torchrun_extract import assert_same_documents
from test_torchrun_train import COMMON, assert_same_run, some_rows

from saecli.train.files import CHECKPOINT

NETWORK = "10.77.7"


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces that reach each other, and nothing else."""
    names = f"sae-{os.getpid()}-a", f"sae-{os.getpid()}-b"
    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        if (made := ip("link", "add", "sae0", "netns", names[0], "type", "veth", "peer", "name", "sae0", "netns",
                       names[1])).returncode:
            pytest.skip(f"they cannot be joined here: {made.stderr.strip()}")
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"{NETWORK}.{number}/24", "dev", "sae0")
            for device in ("lo", "sae0"):
                assert ip("-n", name, "link", "set", device, "up").returncode == 0
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def launcher(hosts: tuple[str, str], number: int, port: int) -> list[str]:
    where = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", f"{NETWORK}.1", "--master-port", str(port)]
    return ["ip", "netns", "exec", hosts[number], *torchrun(1, *where)]


def ended(*launchers: Launched) -> list:
    return [one.done() for one in launchers]


@pytest.mark.long
def test_two_hosts_extract_and_train_as_one_process_does(sae: CommandLine, hosts: tuple[str, str]):
    make_store(sae.home, "rows", some_rows())
    train = ("train", *COMMON, "--act", "topk", "--k", "3", "--epochs", "2")
    extract = ("extract", "--model", "tiny-gemma2", "--layer", "1", "--rows", "15000", "--shard-rows", "1000")
    assert sae(*train, "--name", "one").status == 0
    assert sae(*extract, "--name", "one").status == 0
    for port, words in ((29571, train), (29572, extract)):
        both = ("--home", sae.home, *words, "--name", "two")
        with (launched(launcher(hosts, 0, port), *both, GLOO_SOCKET_IFNAME="sae0") as first,
              launched(launcher(hosts, 1, port), *both, GLOO_SOCKET_IFNAME="sae0") as second):
            done = ended(first, second)
        assert [one.status for one in done] == [0, 0], done
        assert done[0].out
        assert not done[1].out
        assert own_words(done[1].err) == []
    assert_same_run(sae.home, "two", "one")
    assert_same_documents(sae.home, "two", "one")


@pytest.mark.slow
def test_a_process_killed_on_one_host_ends_that_of_the_other(sae: CommandLine, hosts: tuple[str, str]):
    make_store(sae.home, "rows", some_rows())
    both = ("--home", sae.home, "train", *COMMON, "--epochs", "300", "--name", "killed")
    with (launched(launcher(hosts, 0, 29573), *both, GLOO_SOCKET_IFNAME="sae0") as first,
          launched(launcher(hosts, 1, 29573), *both, GLOO_SOCKET_IFNAME="sae0") as second):
        first.until((sae.home / "runs" / "killed" / CHECKPOINT).exists)
        os.kill(second.ranks()[1], signal.SIGKILL)
        killed = time.monotonic()
        done = ended(first, second)
        assert time.monotonic() - killed < 60
    assert [one.status for one in done] == [1, 1]
    assert own_words(done[0].err)[-1].startswith("sae: process 0 of 2: lost the others of 2 processes")
    assert "goes on after the last whole epoch" in done[0].err

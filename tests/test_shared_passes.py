import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from saecli.training.shared_passes import Share, alone, in_step


class Source:
    """Passes over numbers, which counts how often each batch is read and refuses two that are read at once."""

    def __init__(self, length: int = 5) -> None:
        self.length, self.read, self.closed = length, [], 0

    def batches(self, kind: str, epoch: int) -> Iterator[np.ndarray]:
        buffer = np.empty(2)  # written to again, as the store's are
        try:
            for index in range(self.length):
                self.read.append((kind, epoch, index))
                buffer[:] = hash((kind, epoch, index)) % 1000
                yield buffer
        finally:
            self.closed += 1


def training(source: Source, extra: int = 0, epochs: int = 3):
    """Goes through epochs of two passes, the first of them with `extra` more, and returns all it saw."""

    def action(share: Share) -> list[float]:
        seen = []
        for epoch in range(epochs):
            for batch in share("shuffled", lambda epoch=epoch: source.batches("shuffled", epoch), epoch):
                seen.append(float(batch.sum()))
            for _ in range(1 + extra * (epoch == 0)):
                for batch in share("sequential", lambda epoch=epoch: source.batches("sequential", epoch)):
                    seen.append(float(batch.sum()))
        return seen

    return action


def test_each_sees_what_it_sees_alone_and_equal_trainings_read_every_batch_once():
    expected = training(Source())(alone)
    source = Source()
    outcomes = in_step([training(source)] * 4)
    assert [outcome.result for outcome in outcomes] == [expected] * 4
    assert len(source.read) == len(set(source.read)) == 3 * 2 * source.length
    assert source.closed == 6


def test_one_with_passes_of_its_own_is_waited_for_and_shares_again():
    source = Source()
    first, second = in_step([training(source), training(source, extra=2)])
    assert first.result == training(Source())(alone)
    assert second.result == training(Source(), extra=2)(alone)
    assert len(source.read) == 3 * 2 * source.length + 2 * source.length


def test_a_pass_within_a_pass_and_a_pass_left_early():
    def action(inner_at: int, leave_at: int):
        def run(share: Share) -> list[float]:
            seen = []
            for index, batch in enumerate(share("shuffled", lambda: source.batches("shuffled", 0), 0)):
                seen.append(float(batch.sum()))
                if index == inner_at:
                    seen += [float(inner.sum()) for inner in share("inner", lambda: source.batches("inner", 0))]
                if index == leave_at:
                    break
            return seen

        return run

    cases = [action(1, 9), action(3, 9), action(1, 2)]
    source = Source()
    expected = [case(alone) for case in cases]
    source.read.clear()
    assert [outcome.result for outcome in in_step(cases)] == expected
    assert source.read.count(("shuffled", 0, 4)) == 1
    assert source.read.count(("inner", 0, 0)) == 2  # twice at batch 1 at once, once at batch 3


def test_a_failure_leaves_the_others_to_go_on():
    def fails(share: Share) -> None:
        batches = share("shuffled", lambda: source.batches("shuffled", 0), 0)  # which the traceback keeps alive
        for _ in batches:
            raise ValueError("diverged")

    source = Source()
    good, bad = in_step([training(source), fails])
    assert str(bad.error) == "diverged"
    assert good.result == training(Source())(alone)


def test_rows_that_cannot_be_read_are_told_to_all_that_share_them():
    def damaged() -> Iterator[np.ndarray]:
        yield np.zeros(2)
        raise OSError("damaged")

    def reads(share: Share) -> None:
        for _ in share("shuffled", damaged, 0):
            pass

    outcomes = in_step([reads, reads])
    assert [str(outcome.error) for outcome in outcomes] == ["damaged", "damaged"]


def test_an_interrupt_reaches_all():
    def interrupts(share: Share) -> None:
        for index, _ in enumerate(share("shuffled", lambda: source.batches("shuffled", 0), 0)):
            if index == 2:
                signal.raise_signal(signal.SIGINT)

    source = Source(1000)
    before = threading.active_count()
    outcomes = in_step([interrupts, training(source)])
    assert [type(outcome.error) for outcome in outcomes] == [KeyboardInterrupt] * 2
    assert len(source.read) < 10 and threading.active_count() == before


def test_one_thread_at_a_time():
    running = []

    def action(share: Share) -> None:
        for _ in share("shuffled", lambda: Source().batches("shuffled", 0), 0):
            running.append(threading.get_ident())
            assert len(running) == 1
            for _ in range(1000):
                pass
            running.pop()

    assert all(outcome.error is None for outcome in in_step([action] * 3))


@pytest.mark.parametrize("count", [0, 1])
def test_none_and_one(count):
    assert len(in_step([training(Source())] * count)) == count

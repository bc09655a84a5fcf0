"""The training loop: batches of rows are pushed to solvers, epoch by epoch.

Several SAEs are trained from one reading of the rows: each batch goes to each of their solvers in turn, with the same
results as alone.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from ..sae.batch import Batch
from ..sae.dictionary import SAE
from ..sae.metrics import reconstructions
from ..store.rows import RowSource
from .rows import raw_batches
from .trainer import Measures, Trainer


class Loop:
    """Trains SAEs on the same batches.

    Args:
        trainers: one per SAE; their plans have the same rows, normalisation, batch size and order.

    Attributes:
        errors: with several trainers, the errors of those that failed; the others continue.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers = trainers
        self.errors: dict[Trainer, Exception] = {}

    def train(self) -> list[SAE]:
        """Train to the end.

        Returns:
            The SAEs that did not fail, acting on raw activations.

        Raises:
            TrainingError: the only one diverged: the loss or a weight became NaN or infinite, or the reconstructions
                are far worse than none; its last checkpoint, `Trainer.kept`, is from before that.
        """
        try:
            self._each(lambda trainer: trainer.begin(next((one.rows for one in self._live() if one.rows), None)))
            while running := [trainer for trainer in self._live() if trainer.progress.epoch < trainer.epochs]:
                self._epoch(min(trainer.progress.epoch for trainer in running), running)
        finally:
            for trainer in self.trainers:
                trainer.record.end()
        return [trainer.sae for trainer in self._live()]

    def results(self, saes: Sequence[SAE]) -> list[dict]:
        """`Trainer.result` of each training that did not fail, given the SAEs that `train` returned.

        Cost: a pass over the training rows.
        """
        live = self._live()
        train = self._measured(saes, live[0].train_rows)
        tests = [trainer.test for trainer in live]
        if None in tests:  # no epoch was left to train
            tests = self._measured(saes, live[0].test_rows)
        return [trainer.result(*measures) for trainer, *measures in zip(live, train, tests, strict=True)]

    def _epoch(self, epoch: int, running: Sequence[Trainer]) -> None:
        rows = running[0].rows
        self._each(Trainer.begin_epoch, running)
        self._decoder_steps(epoch, 0, running)
        with closing(rows.shuffled(epoch)) as batches:
            for number, batch in enumerate(batches, 1):
                self._each(Trainer.step, running, batch)
                if number < running[0].batches:
                    self._decoder_steps(epoch, number, running)
                if all(trainer.solver.finished for trainer in self._live(running)):
                    break
        self._each(Trainer.end_epoch, running)
        self._decoder_steps(epoch, running[0].batches, running)
        saes = {trainer: trainer.sae for trainer in self._live(running)}
        self._each(lambda trainer: trainer.demand_convergence(saes[trainer]), running)
        live = self._live(running)
        if not live:
            return
        tests: dict[Trainer, Measures] = {}
        if live[0].test_rows is not None:
            tests = dict(zip(live, self._measured([saes[trainer] for trainer in live], live[0].test_rows), strict=True))
        self._each(lambda trainer: trainer.keep(saes[trainer], tests.get(trainer)), live)

    def _decoder_steps(self, epoch: int, number: int, running: Sequence[Trainer]) -> None:
        """Make the decoder steps after a batch of an epoch; solvers that need equally many rows share a pass."""
        order = epoch * (running[0].batches + 1) + number  # other rows for each pass, if not all are taken
        due = {trainer: now for trainer in self._live(running) if (now := trainer.solver.passes.get((epoch, number)))}

        def end(trainer: Trainer) -> None:
            if trainer.end_pass():
                del due[trainer]

        while due := {trainer: now for trainer, now in due.items() if trainer not in self.errors}:
            count = next(iter(due.values())).rows
            members = [trainer for trainer, now in due.items() if now.rows == count]
            again: Callable[[], Iterable[Batch]] = partial(members[0].rows.some, count, order)
            self._each(lambda trainer, again: trainer.solver.begin_pass(due[trainer], again), members, again)
            for batch in again():
                self._each(lambda trainer, batch: trainer.solver.observe(batch), members, batch)
            self._each(end, members)

    def _each(self, action: Callable[..., None], trainers: Sequence[Trainer] | None = None, *given: Any) -> None:
        """Call `action(trainer, *given)` for each that has not failed; with several, an error ends only its own."""
        for trainer in self._live(trainers):
            try:
                action(trainer, *given)
            except Exception as error:  # reported at the end, when the others have finished
                if len(self.trainers) == 1:
                    raise
                self.errors[trainer] = error

    def _live(self, trainers: Sequence[Trainer] | None = None) -> list[Trainer]:
        return [trainer for trainer in (self.trainers if trainers is None else trainers) if trainer not in self.errors]

    def _measured(self, saes: Sequence[SAE], stored: RowSource) -> list[Measures]:
        communicator = self.trainers[0].communicator
        return reconstructions(saes, raw_batches(stored, communicator), communicator)

"""The training loop: batches of rows are pushed to a solver, and decoder steps made when they are due."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from ..base.errors import TrainingError
from ..sae.dictionary import SAE
from ..sae.metrics import reconstructions
from ..store.reader import RowSource
from .rows import raw_batches
from .training import Measures, Training


class Loop:
    def __init__(self, training: Training) -> None:
        self.training = training

    def train(self) -> SAE:
        """Returns the SAE, acting on raw activations."""
        try:
            self._train()
            self._compare()
        finally:
            self.training.record.end()
        return self.training.sae

    def _train(self) -> None:
        training, plan = self.training, self.training.plan
        done = training.progress.step
        if done == plan.steps:
            return
        with closing(training.rows.from_step(done, plan.batches, plan.epochs)) as batches:
            for step, batch in enumerate(batches, done + 1):
                training.take(training.solver.step(batch))
                self._decoder_step(step)
                if step == plan.steps or step % plan.batches == 0:
                    self._keep(after_epoch=True)
                elif training.is_due():
                    self._keep(after_epoch=False)
                if step == plan.steps:
                    return
        # A model's text has ended early. Weights next to a sum over all rows are for those that came.
        training.solver.task = replace(training.solver.task, rows=plan.train_rows.rows)
        training.solver.calibrate()
        self._decoder_step(plan.steps)
        self._keep(after_epoch=True)

    def _compare(self) -> None:
        """Choose between the SAE that training began with, if it did, and its last."""
        training = self.training
        if training.comparison is not None:
            dictionary, communicator = training.solver.dictionary, training.rows.communicator
            training.choose(training.comparison.measured(training.plan, dictionary, communicator))

    def _decoder_step(self, step: int) -> None:
        """Make the decoder step that is due after a step, if any."""
        training = self.training
        due = training.solver.schedule.get(step)
        if due is None:
            return
        reread = partial(training.rows.some, due.rows, step)
        decoder_step = training.solver.decoder_step(due, reread)
        for batch in reread():
            decoder_step.add(batch)
        try:
            training.solver.update(decoder_step)
        except TrainingError:
            # Other processes, which have not failed, would not all-reduce.
            if training.rows.communicator.world_size == 1:
                training.log()  # a NaN loss explains the failure better
            raise

    def _keep(self, after_epoch: bool) -> None:
        """Keep SAE and checkpoint; after an epoch with measures on test rows."""
        training = self.training
        training.log()
        sae = training.sae
        training.demand_convergence(sae)
        if after_epoch and training.plan.test_rows is not None:
            training.test = self._measured(sae, training.plan.test_rows)
        training.keep(sae, after_epoch)

    def result(self, sae: SAE) -> dict[str, Any]:
        """`Training.result` of the SAE that `train` returned. Cost: a pass over the training rows."""
        training, plan = self.training, self.training.plan
        train = self._measured(sae, plan.train_rows)
        test = training.test or {}
        if not test and plan.test_rows:  # no step was left to train, or the start is kept
            test = self._measured(sae, plan.test_rows)
        return training.result(train, test)

    def _measured(self, sae: SAE, rows: RowSource) -> Measures:
        communicator = self.training.rows.communicator
        (measures,) = reconstructions([sae], raw_batches(rows, communicator), communicator)
        return measures

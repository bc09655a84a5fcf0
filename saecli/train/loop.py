"""The training loop: batches of rows are pushed to solvers, and decoder steps made when they are due.

Several SAEs are trained from one reading of the rows, with the same results as alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from ..base.errors import TrainingError
from ..sae.dictionary import SAE, Batch
from ..sae.metrics import reconstructions
from .decoder_step import Pass
from .rows import raw_batches
from .training import Measures, Training


class Loop:
    """Trains SAEs, of plans with the same rows, normalisation, batch size, order and number of steps. If `alone`, the
    error of a training is raised, rather than kept in `errors` while the others go on."""

    def __init__(self, trainings: Sequence[Training], alone: bool = True) -> None:
        self.trainings, self.alone = trainings, alone
        self.errors: dict[Training, Exception] = {}

    def train(self) -> list[SAE]:
        """Train to the end. Returns the SAEs that did not fail, acting on raw activations."""
        try:
            if self.trainings:
                self._train()
            self._each(self._compare)
        finally:
            for training in self.trainings:
                training.record.end()
        return [training.sae for training in self.live()]

    def _train(self) -> None:
        plan, rows = self.trainings[0].plan, self.trainings[0].rows
        done = step = self.trainings[0].progress.step
        if done == plan.steps:
            return
        if done == 0:
            self._decoder_steps(0)
        with closing(rows.from_step(done, plan.batches, plan.epochs)) as batches:
            for step, batch in enumerate(batches, done + 1):
                self._each(
                    lambda training, batch: training.take(training.solver.step(batch)), batch
                )
                self._decoder_steps(step)
                if step == plan.steps or step % plan.batches == 0:
                    self._keep(self.live(), after_epoch=True)
                else:
                    self._keep([training for training in self.live() if training.is_due()])
                if step == plan.steps or not self.live():
                    return
        self._each(lambda training: training.solver.calibrate())  # a model's text has ended early
        self._decoder_steps(plan.steps)
        self._keep(self.live(), after_epoch=True)

    def _compare(self, training: Training) -> None:
        """Choose between the SAE that training began with, if it did, and its last."""
        if training.comparison is not None:
            dictionary, communicator = training.solver.dictionary, training.rows.communicator
            training.choose(training.comparison.measured(training.plan, dictionary, communicator))

    def live(self) -> list[Training]:
        return self._among(self.trainings)

    def _decoder_steps(self, step: int) -> None:
        """Make the decoder steps that are due after a step; solvers that need equally many rows share a pass."""
        due: dict[int, dict[Training, Pass]] = {}
        for training in self.live():
            decoder_pass = training.solver.schedule.get(step)
            if decoder_pass is not None:
                due.setdefault(decoder_pass.rows, {})[training] = decoder_pass
        for count, passes in due.items():
            rows = next(iter(passes)).rows
            self._decoder_step(passes, partial(rows.some, count, step))

    def _decoder_step(
        self, passes: Mapping[Training, Pass], reread: Callable[[], Iterable[Batch]]
    ) -> None:
        steps: dict[Training, Any] = {}

        def begin(training: Training) -> None:
            steps[training] = training.solver.decoder_step(passes[training], reread)

        def update(training: Training) -> None:
            try:
                training.solver.update(steps.pop(training))
            except TrainingError:
                # The others, which have not failed, would not all-reduce.
                if training.rows.communicator.world_size == 1:
                    training.log()  # a NaN loss explains the failure better
                raise

        self._each(begin, among=passes)
        for batch in reread():
            self._each(lambda training, batch: steps[training].add(batch), batch, among=passes)
        self._each(update, among=passes)

    def _keep(self, trainings: Sequence[Training], after_epoch: bool = False) -> None:
        """Keep SAEs and checkpoints; after an epoch with measures on test rows."""
        self._each(Training.log, among=trainings)
        trainings = self._among(trainings)
        saes = {training: training.sae for training in trainings}
        self._each(lambda training: training.demand_convergence(saes[training]), among=trainings)
        trainings = self._among(trainings)
        if not trainings:
            return
        if after_epoch and trainings[0].plan.test_rows is not None:
            tests = self._measured([saes[t] for t in trainings], "test_rows")
            for training, test in zip(trainings, tests, strict=True):
                training.test = test
        self._each(lambda training: training.keep(saes[training], after_epoch), among=trainings)

    def _among(self, trainings: Iterable[Training]) -> list[Training]:
        return [training for training in trainings if training not in self.errors]

    def _each(
        self,
        action: Callable[..., None],
        *arguments: Any,
        among: Iterable[Training] | None = None,
    ) -> None:
        """Call `action(training, ...)` for each that has not failed; with several, an error ends only its own."""
        for training in self._among(self.trainings if among is None else among):
            try:
                action(training, *arguments)
            except Exception as error:  # reported at the end, when the others have finished
                if self.alone:
                    raise
                self.errors[training] = error

    def results(self, saes: Sequence[SAE]) -> list[dict[str, Any]]:
        """`Training.result` of each SAE that `train` returned. Cost: a pass over the training rows."""
        trainings = self.live()
        plan = trainings[0].plan
        train = self._measured(saes, "train_rows")
        tests = [training.test or {} for training in trainings]
        if {} in tests and plan.test_rows:  # no step was left to train, or the start is kept
            tests = self._measured(saes, "test_rows")
        return [
            training.result(*measures)
            for training, *measures in zip(trainings, train, tests, strict=True)
        ]

    def _measured(self, saes: Sequence[SAE], part: str) -> list[Measures]:
        """On the plans' `train_rows` or `test_rows`, which the SAEs share."""
        communicator = self.trainings[0].rows.communicator
        rows = getattr(self.trainings[0].plan, part)
        return reconstructions(saes, raw_batches(rows, communicator), communicator)

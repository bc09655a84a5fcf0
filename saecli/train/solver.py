"""What every solver has: descent by Adam, revival, the state to resume; and SGD, the baseline of the field's tools.

B rows, D = d_in, E = d_out, F = d_sae. All rows are normalised (see `rows.py`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..base.devices import moved, products_in
from ..base.processes import ALONE, Communicator
from ..sae.activations import Parameters
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Batch, Coupled, Dictionary
from .adam import Adam
from .moments import Pass
from .options import REVIVAL_ROWS, Paper, Revival, Sgd, SolverConfig, TrainingConfig
from .rows import Smoothing

DECODER_STEPS = 20  # aimed at in all of training; SGD looks for dead latents as often
REVIVAL = 0.9  # fraction of all steps during which dead latents are revived; the rest is for them to settle
PROXIMAL = {"W_enc": "mu_enc", "b_enc": "nu_enc"}  # options: proximal weight of each tensor


class Draws(IntEnum):
    """What random numbers are drawn for; each has a stream of its own."""

    STEP = 0
    DECODER_STEP = 1
    REVIVAL = 2


@dataclass(frozen=True, eq=False)
class Task:
    """The training problem. A batch's loss is the mean over its rows of `||y_hat - y||^2 + sparsity_weight * penalty`;
    terms that the paper adds to the sum over all N rows are divided by N."""

    training: TrainingConfig
    rows: int  # N
    steps: int  # of the optimiser in all of training
    lr: float  # the peak
    # Spread over all rows, (n, D) with targets (n, E), for smoothing, revival and an activation's estimates; may be
    # empty.
    sample: Batch = field(default_factory=lambda: Batch.of(torch.empty(0, 0)))
    # Rows kept out of training, on which thresholds are set, else on the sample.
    unseen: Batch | None = None
    # The targets' regression on the rows, (D, E); None if they are the rows.
    B: Tensor | None = None
    # W_enc or W_dec, kept bit for bit; then no latent is re-aimed or rescaled.
    held: str | None = None
    begun: bool = False  # from an SAE: latents are revived once, before the first step
    memory: float = math.inf  # bytes that a decoder step may use

    @property
    def batches(self) -> int:
        return self.training.epoch_batches(self.rows)

    def learning_rate(self, step: int) -> float:
        """The rate at a step, from 0: a linear rise, a plateau, a linear fall to zero."""
        rise = (step + 1) / max(1, math.ceil(self.training.lr_warm_up * self.steps))
        fall = (self.steps - step) / max(1, math.ceil(self.training.lr_decay * self.steps))
        return self.lr * min(1.0, rise, fall)

    def penalty_weight(self, step: int) -> float:
        rise = (step + 1) / max(1, math.ceil((self.training.sparsity_warm_up or 0.0) * self.steps))
        return (self.training.sparsity_weight or 0.0) * min(1.0, rise)


@dataclass(frozen=True)
class StepReport:
    """A process' part of a smoothed batch's measures before its step; tensors, so that nothing waits for the device."""

    step: int
    rows: int
    loss: Tensor  # with penalty and proximal terms
    squared_error: Tensor  # mean ||y_hat - y||^2
    l0: Tensor  # mean


class Solver:
    """Trains a dictionary on batches that are pushed to it, one optimiser step each.

    After the steps that `schedule` names the loop makes a decoder step.

    Args:
        dictionary: trained in place, but for the parameters named in `held`.
    """

    schedule: Mapping[int, Pass] = {}

    def __init__(
        self,
        dictionary: Dictionary,
        held: Collection[str],
        task: Task,
        config: SolverConfig,
        communicator: Communicator = ALONE,
    ) -> None:
        self.dictionary, self.task, self.config = dictionary, task, config
        self.re_aims = isinstance(config, Revival) and config.revive  # dead latents
        self.communicator = communicator
        self.paper = config if isinstance(config, Paper) else Paper()
        self.penalty = dictionary.activation.penalty(task.training.sparsity or "none")
        self.smoothing = Smoothing(float(task.training.smoothing), task.sample.x, task.sample.y)
        # Sparse products read the weights latent by latent, so each latent's are contiguous, as in the decoder.
        dictionary.W_enc.data = dictionary.W_enc.data.T.contiguous().T
        frozen = {*held, task.held, *dictionary.estimates}
        for name, parameter in dictionary.named_parameters():
            parameter.requires_grad_(name not in frozen)
        several = communicator.world_size > 1
        self.optimizer = Adam(
            dict(dictionary.named_parameters()),
            self.paper.clip_norm,
            communicator.all_reduce if several else None,
        )
        self.steps = 0
        self.revived = 0
        self.hold_encoder()

    @property
    def finished(self) -> bool:
        return self.steps >= self.task.steps

    def step(self, batch: Batch) -> StepReport:
        """One step of descent on a batch; after the last the activation's estimates are calibrated."""
        report, codes = self.descend(batch)
        self.take_codes(codes, batch.size)
        if self.finished:
            self.calibrate()
        return report

    def decoder_step(self, due: Pass, reread: Callable[[], Iterable[Batch]]) -> Any:
        """Begin one of `schedule`; the loop pushes it the rows of its pass, and gives it to `update`.

        `reread` gives the rows once more.
        """
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def update(self, step: Any) -> None:
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def descend(self, batch: Batch) -> tuple[StepReport, Codes]:
        """One step of the optimiser on a batch, and its codes, smoothed."""
        task, dictionary, step = self.task, self.dictionary, self.steps
        training = task.training
        batch = self.smoothing(batch, self.draws(step, Draws.STEP))
        self.optimizer.zero_grad()
        with products_in(training.precision):
            loss = dictionary.loss(batch, training.sparsity or "none", task.penalty_weight(step))
            value = loss.value + self.extra_loss() / self.communicator.world_size
            value.backward()
            self.optimizer.step(task.learning_rate(step))
        self.steps = step + 1
        codes = loss.codes.detach()
        with torch.no_grad():
            parameters = dictionary.activation_parameters
            estimates = dictionary.activation.after_step(codes, parameters)
            estimates |= self.penalty.after_step(codes, parameters, self.steps / task.steps)
            for name, estimate in estimates.items():
                parameters[name].copy_(self.communicator.mean(estimate))
        l0 = codes.count().double() / batch.size
        squared_error = loss.squared_error.detach()
        return StepReport(self.steps, batch.size, value.detach(), squared_error, l0), codes

    def take_codes(self, codes: Codes, rows: int) -> None:
        """Look at a batch's codes, (b, F), of `rows` rows in all processes."""

    def extra_loss(self) -> Tensor | float:
        """The paper's proximal terms and weight decay, over N."""
        total: Tensor | float = 0.0
        for name, reference in self._references.items():
            weight = getattr(self.paper, PROXIMAL[name])
            total = total + weight * (getattr(self.dictionary, name) - reference).square().sum()
        if self.paper.weight_decay:
            matrices = [tensor for tensor in self.optimizer.tensors.values() if tensor.dim() == 2]
            squares = sum(matrix.square().sum() for matrix in matrices)
            total = total + self.paper.weight_decay * squares
        return total / self.task.rows

    def hold_encoder(self) -> None:
        """Take this encoder as the reference of its proximal terms."""
        self._references = {
            name: getattr(self.dictionary, name).detach().clone()
            for name, weight in PROXIMAL.items()
            if getattr(self.paper, weight)
        }

    @property
    def revives(self) -> bool:
        last = 1 if self.task.begun else REVIVAL * self.task.steps
        return self.re_aims and not self.task.held and self.steps < last

    @torch.no_grad()
    def revive(self, fired: Tensor, rows: float) -> None:
        """Re-aim latents that did not fire, a mask (F,), at rows of the sample that are reconstructed worst: each at a
        row of its own, so if there are fewer rows than latents only the first."""
        dead = ~fired
        count = int(dead.sum())
        if not self.revives or rows < REVIVAL_ROWS * len(dead) or not 0 < count < len(dead):
            return
        directions = self._directions(count)
        if not len(directions):
            return
        aimed = dead & (dead.cumsum(0) <= len(directions))
        penalised = self.task.training.penalised
        re_aim(self.dictionary, aimed, fired, directions, self.task.B, penalised)
        self.optimizer.forget(aimed, fired, self.dictionary.latent_dimension)
        self.revived += len(directions)

    def _directions(self, count: int) -> Tensor:
        """`directions_of_worst` of the sample; the same in all processes."""
        sample, draws = self.task.sample, self.draws(self.steps, Draws.REVIVAL)
        residuals = sample.y - self.dictionary(sample.x)
        directions = residuals[:0]
        # If training has diverged, the check of the loss will say so.
        if self.communicator.is_main and residuals.isfinite().all():
            directions = directions_of_worst(sample.x, residuals, count, draws)
        return self.communicator.broadcast_rows(directions)

    @torch.no_grad()
    def calibrate(self) -> None:
        """Set the activation's estimates for other rows than those trained on."""
        for name, value in self.calibrated(self.dictionary).items():
            self.dictionary.activation_parameters[name].copy_(value)

    @torch.no_grad()
    def calibrated(self, dictionary: Dictionary) -> Parameters:
        """The estimates of a dictionary's activation for other rows than those trained on."""
        parameters = dictionary.activation_parameters
        rows = self.task.sample if self.task.unseen is None else self.task.unseen
        if not dictionary.estimates or not len(rows.x):
            return {}
        pre = dictionary.pre_activations(rows.x)
        of_penalty = self.penalty.calibrated(pre, parameters)
        return dictionary.activation.calibrated(pre, parameters) | of_penalty

    def record(self) -> dict[str, float]:
        return {"revived": self.revived}

    def notes(self) -> list[str]:
        return []

    def sae(self) -> SAE:
        """The current SAE, acting on normalised rows."""
        return self.dictionary.sae().without_training_parameters()

    def draws(self, number: int, purpose: Draws) -> torch.Generator:
        seed = (self.task.training.seed * 7 + purpose) * 1_000_000_007 + number
        return torch.Generator().manual_seed(seed % 2**32)  # the CPU's generator takes no more bits

    def state(self) -> dict[str, Tensor]:
        """All tensors needed to resume; called by all processes together."""
        weights = self.dictionary.state_dict().items()
        return {
            **{f"dictionary.{name}": tensor for name, tensor in weights},
            **self.optimizer.state(),
            **{f"reference.{name}": tensor for name, tensor in self._references.items()},
            "steps": torch.tensor(self.steps),
            "revived": torch.tensor(self.revived),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.steps, self.revived = int(state["steps"]), int(state["revived"])
        with torch.no_grad():
            for name, tensor in self.dictionary.state_dict().items():
                tensor.copy_(state[f"dictionary.{name}"])
        self.optimizer.restore(state)
        self._references = {
            name: state[f"reference.{name}"].to(reference)
            for name, reference in self._references.items()
        }


class SgdSolver(Solver):
    config: Sgd

    def __init__(
        self, initial: SAE, task: Task, config: Sgd, communicator: Communicator = ALONE
    ) -> None:
        super().__init__(self.dictionary_of(initial, task, config), (), task, config, communicator)
        self._between = min(task.batches, math.ceil(task.steps / DECODER_STEPS))
        self._forget_firing()

    @staticmethod
    def dictionary_of(initial: SAE, task: Task, config: Sgd) -> Dictionary:
        """A copy of the initial SAE, as the kind of dictionary that is trained."""
        return Coupled(initial.sae(), 1.0, None, task.B) if config.tied else initial.sae()

    def step(self, batch: Batch) -> StepReport:
        # Before it, so that a step follows where a text ends early too.
        enough = min(self.task.rows, REVIVAL_ROWS * self.dictionary.d_sae)
        if self.steps % self._between == 0 and self._seen >= enough:
            fired = self.communicator.all_reduce(self._fired.to(torch.int32)) > 0
            self.revive(fired, min(self._seen, self.task.rows))
            self._forget_firing()
        report = super().step(batch)
        if self.steps % self.task.batches == 0:
            self.hold_encoder()
        return report

    def take_codes(self, codes: Codes, rows: int) -> None:
        self._seen += rows
        self._fired |= codes.fired()

    def _forget_firing(self) -> None:
        self._seen, self._fired = 0, torch.zeros_like(self.dictionary.b_enc, dtype=torch.bool)

    def state(self) -> dict[str, Tensor]:
        fired = self.communicator.all_reduce(self._fired.to(torch.int32))
        return super().state() | {"seen": torch.tensor(self._seen), "fired": fired}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._seen, self._fired = int(state["seen"]), state["fired"].to(self._fired.device) > 0


@torch.no_grad()
def re_aim(
    dictionary: Dictionary,
    dead: Tensor,
    others: Tensor,
    directions: Tensor,
    B: Tensor | None,
    biased: bool,
) -> None:
    """Re-aim m dead latents, a mask (F,), at unit vectors d, (m, E), with the mean norms and parameters of others, a
    mask, (F,).

    The encoder is aimed along `B d`, B being the targets' regression, (D, E). A decoder that descends is aimed at d;
    one that is solved for stays tied until the next decoder step. b_enc is 0, which finds most features, or if `biased`
    the mean of the others: under a penalty latents that start dense can stay so, with small codes.
    """

    def mean_of_others(values: Tensor) -> Tensor:
        return values.masked_fill(~others, 0).sum() / others.sum()

    W_enc, along = dictionary.W_enc, directions.T
    if B is not None:
        along = B @ along
        norms = along.norm(dim=0)
        along = along / norms.masked_fill(norms == 0, 1)
    W_enc[:, dead] = mean_of_others(W_enc.norm(dim=0)) * along
    dictionary.b_enc.masked_fill_(dead, mean_of_others(dictionary.b_enc) if biased else 0.0)
    for name, parameter in dictionary.activation_parameters.items():
        if dictionary.latent_dimension(name) is not None:
            parameter.masked_fill_(dead, mean_of_others(parameter))
    for name, parameter in dictionary.named_parameters():
        if name in ("W_dec", "Delta"):
            norm = mean_of_others(parameter.norm(dim=1)) if parameter.requires_grad else 0.0
            parameter[dead] = norm * directions


def directions_of_worst(
    x: Tensor, residuals: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """Unit directions, (m, E), of the residuals, (n, E), of different rows x, (n, D), drawn without replacement with
    probability proportional to their square: `count`, or all that differ and have a residual.

    Latents re-aimed at one row would be copies, which descent never parts.
    """
    scaled = residuals.double() / residuals.abs().max().clamp(min=torch.finfo(residuals.dtype).tiny)
    groups = torch.unique(x, dim=0, return_inverse=True)[1].cpu()  # (n,), the same for equal rows
    numbers = torch.arange(len(x))
    first = numbers.new_full((len(x),), len(x)).scatter_reduce_(0, groups, numbers, "amin")
    weights = torch.where(first[groups] == numbers, scaled.square().sum(1).cpu(), 0.0)
    count = min(count, int(weights.count_nonzero()))
    if not count:
        return residuals[:0]
    drawn = torch.multinomial(weights, count, generator=generator)
    chosen = scaled[moved(drawn, scaled.device)]
    return (chosen / chosen.norm(dim=1, keepdim=True)).to(residuals.dtype)

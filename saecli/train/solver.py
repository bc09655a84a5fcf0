"""What every solver has: descent by Adam, revival, the state to resume; and SGD, the baseline of the field's tools.

B rows, D = d_in, E = d_out, F = d_sae. All rows are normalised (see `rows.py`).
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adam import adam

from ..base.devices import products_in
from ..base.processes import ALONE, Communicator
from ..sae.codes import Codes
from ..sae.dictionary import SAE, Batch, Coupled, Dictionary, mixed
from .decoder_step import Pass, directions_of_worst, revive
from .options import REVIVAL_ROWS, WINDOW, Sgd, SolverConfig, TrainingConfig
from .rows import Smoothing

REVIVALS = 20  # times that SGD looks for dead latents in all of training, at least once per epoch
REVIVAL = 0.9  # fraction of all steps during which dead latents are revived; the rest is for them to settle
RECENT_ROWS = 4096  # least rows of the last batches, at which dead latents are re-aimed
DECODER_STEP, REVIVING, MIXING, CALIBRATING = 1, 2, 3, 4  # kinds of draws; 0 for steps
PROXIMAL = {"W_enc": "mu_enc", "b_enc": "nu_enc"}  # options: proximal weight of each tensor


@dataclass(frozen=True, eq=False)
class Task:
    """The training problem. A batch's loss is the mean over its rows of `||y_hat - y||^2 + sparsity_weight * penalty`;
    terms that the paper adds to the sum over all N rows are divided by N."""

    training: TrainingConfig
    rows: int  # N
    steps: int  # of the optimiser in all of training
    lr: float  # the peak
    # Spread over all rows, (n, D) with targets (n, E), for smoothing and an activation's estimates; may be empty.
    sample: Batch = field(default_factory=lambda: Batch.of(torch.empty(0, 0)))
    B: Tensor | None = (
        None  # the targets' linear regression on the rows, (D, E); None if they are the rows
    )
    held: str | None = (
        None  # W_enc or W_dec, kept bit for bit; then no latent is revived, silenced or rescaled
    )
    begun: bool = False  # from an SAE: latents are revived once, before the first step
    memory: float = math.inf  # bytes that the solver may use

    @property
    def batches(self) -> int:
        return self.training.epoch_batches(self.rows)

    def learning_rate(self, step: int) -> float:
        """At a step, from 0: a linear rise, a plateau, a linear fall to zero."""
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
    """Trains a dictionary on batches that are pushed to it.

        solver.begin_epoch()
        for batch in rows: reports = solver.step(batch)
        solver.end_epoch()

    At each of its `passes`, by epoch and number of batches, a decoder step is made: `begin_pass`, `observe` with each
    batch, and `end_pass`, all again until that returns True.

    Args:
        dictionary: trained in place, but for the parameters named in `held`.
        every: batches after which the epoch's rows so far have been trained on.
    """

    passes: Mapping[tuple[int, int], Pass] = {}

    def __init__(
        self,
        dictionary: Dictionary,
        held: Collection[str],
        task: Task,
        config: SolverConfig,
        every: int,
        communicator: Communicator = ALONE,
    ) -> None:
        self.dictionary, self.task, self.config, self.communicator = (
            dictionary,
            task,
            config,
            communicator,
        )
        self.every = every
        self.penalty = dictionary.activation.penalty(task.training.sparsity or "none")
        self.smoothing = Smoothing(float(task.training.smoothing), task.sample.x, task.sample.y)
        # Sparse products read the weights latent by latent, so each latent's are contiguous, as in the decoder.
        dictionary.W_enc.data = dictionary.W_enc.data.T.contiguous().T
        for name, parameter in dictionary.named_parameters():
            parameter.requires_grad_(name not in (*held, task.held, *dictionary.estimates))
        self.optimizer = Adam(
            dict(dictionary.named_parameters()),
            config.clip_norm,
            communicator.all_reduce if communicator.world_size > 1 else None,
        )
        self.steps = 0
        self.revived = 0
        self.batches = 0  # of the epoch, taken so far
        self._window: list[Batch] = []
        self._recent: deque[Batch] = deque()  # the epoch's last batches
        self.hold_encoder()

    @property
    def finished(self) -> bool:
        return self.steps >= self.task.steps

    def begin_epoch(self) -> None:
        self.batches = 0
        self._recent.clear()

    def step(self, batch: Batch) -> list[StepReport]:
        """Collect a batch, and train once there is a window of them."""
        if self.finished:
            return []
        self.batches += 1
        self._window.append(batch)
        self.remember(batch)
        whole = len(self._window) == (1 if self.config.rounds == 1 else WINDOW)
        return self._train_window() if whole or self.batches % self.every == 0 else []

    def remember(self, batch: Batch) -> None:
        """Keep a batch among the last ones, of `RECENT_ROWS`."""
        self._recent.append(batch)
        while sum(batch.size for batch in self._recent) - self._recent[0].size >= RECENT_ROWS:
            self._recent.popleft()

    @property
    def can_be_kept(self) -> bool:
        """Whether `state` and the last batches are all that is needed to resume."""
        return not self._window

    def end_epoch(self) -> list[StepReport]:
        reports = self._train_window()
        if self.finished:
            self.calibrate()
        return reports

    def _train_window(self) -> list[StepReport]:
        """`inner_steps` rounds over the batches, rows mixed anew: repeated steps on one batch would overfit to it."""
        batches, self._window = self._window, []
        if not batches:
            return []
        waiting, inner, size, reports = len(batches), self.config.rounds, batches[0].size, []
        whole = Batch.joined(batches) if inner > 1 else None
        rounds = min(inner, math.ceil((self.task.steps - self.steps) / waiting))
        for round_ in range(rounds):
            taken: Iterable[Batch] = batches
            if whole is not None:
                order = torch.randperm(whole.size, generator=self.draws(self.steps, MIXING))
                taken = mixed(whole, order, size)
            for batch in taken:
                if self.finished:
                    break
                report, codes = self.descend(batch)
                reports.append(report)
                if round_ == rounds - 1:
                    self.trained(codes, report.rows)
        return reports

    def descend(self, batch: Batch) -> tuple[StepReport, Codes]:
        """One step of the optimiser on a batch, and its codes, smoothed."""
        task, training, dictionary, step = (
            self.task,
            self.task.training,
            self.dictionary,
            self.steps,
        )
        batch = self.smoothing(batch, self.draws(step))
        self.optimizer.zero_grad()
        with products_in(training.precision):
            loss = dictionary.loss(batch, training.sparsity or "none", task.penalty_weight(step))
            value = loss.value + self.extra_loss() / self.communicator.world_size
            value.backward()
            self.optimizer.step(task.learning_rate(step))
        self.steps, codes = step + 1, loss.codes.detach()
        with torch.no_grad():
            parameters = dictionary.activation_parameters
            progress = self.steps / task.steps
            estimates = dictionary.activation.after_step(codes, parameters)
            estimates |= self.penalty.after_step(codes, parameters, progress)
            for name, estimate in estimates.items():
                parameters[name].copy_(self.communicator.mean(estimate))
        return StepReport(
            self.steps,
            batch.size,
            value.detach(),
            loss.squared_error.detach(),
            codes.count().double() / batch.size,
        ), codes

    def trained(self, codes: Codes, rows: int) -> None:
        """Take a batch's codes, (b, F), once per epoch."""

    def begin_pass(self, now: Pass, again: Callable[[], Iterable[Batch]]) -> None:
        """Begin one of `passes`, whose batches `again` gives once more."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def observe(self, batch: Batch) -> None:
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def end_pass(self) -> bool:
        """Solve for the decoder. False if the pass has to be made again first."""
        raise TypeError(f"{type(self).__name__} has no decoder step")

    def extra_loss(self) -> Tensor | float:
        """Proximal terms and weight decay, over N."""
        total: Tensor | float = 0.0
        for name, held in self._held.items():
            weight = getattr(self.config, PROXIMAL[name])
            total = total + weight * (getattr(self.dictionary, name) - held).square().sum()
        if self.config.weight_decay:
            weights = (tensor for tensor in self.optimizer.tensors.values() if tensor.dim() == 2)
            total = total + self.config.weight_decay * sum(
                tensor.square().sum() for tensor in weights
            )
        return total / self.task.rows

    def hold_encoder(self) -> None:
        """Take this encoder as the reference of its proximal terms."""
        self._held = {
            name: getattr(self.dictionary, name).detach().clone()
            for name, weight in PROXIMAL.items()
            if getattr(self.config, weight)
        }

    @property
    def revives(self) -> bool:
        return (
            self.config.revive
            and not self.task.held
            and self.steps < (1 if self.task.begun else REVIVAL * self.task.steps)
        )

    @torch.no_grad()
    def revive(self, fired: Tensor, rows: float) -> None:
        """Re-aim latents that did not fire, a mask (F,), at recent rows that are reconstructed worst: each at a row of
        its own, so if there are fewer rows than latents only the first."""
        dead = ~fired
        count = int(dead.sum())
        if not self.revives or rows < REVIVAL_ROWS * len(dead) or not 0 < count < len(dead):
            return
        directions = self._directions(count)
        if not len(directions):
            return
        aimed = dead & (dead.cumsum(0) <= len(directions))
        penalised = self.task.training.penalised
        revive(self.dictionary, aimed, fired, directions, self.task.B, penalised)
        self.optimizer.forget(aimed, fired, self.dictionary.latent_dimension)
        self.revived += len(directions)

    def _directions(self, count: int) -> Tensor:
        """`directions_of_worst` of the last batches, before the first of the sample; the same in all processes."""
        batches = [*self._recent] or [self.task.sample]
        rows = Batch.joined(batches)
        residuals = [batch.y - self.dictionary(batch.x) for batch in batches if len(batch.x)]
        x, residual = rows.x, torch.cat([rows.y[:0], *residuals])
        communicator = self.communicator
        if rows.index is not None:  # rank 0 has all rows, in the order of one process
            order = communicator.gather(rows.index).argsort().to(x.device)
            x, residual = communicator.gather(x)[order], communicator.gather(residual)[order]
        found = residual[:0]
        # If training has diverged, the check of the loss will say so.
        if communicator.is_main and len(x) and residual.isfinite().all():
            found = directions_of_worst(x, residual, count, self.draws(self.steps, REVIVING))
        size = communicator.broadcast_object(lambda: len(found))
        return communicator.broadcast(
            found if communicator.is_main else residual.new_empty(size, residual.shape[1])
        )

    @torch.no_grad()
    def calibrate(self) -> None:
        """Set the activation's estimates for unsmoothed rows."""
        parameters = self.dictionary.activation_parameters
        sample, encoded = self.task.sample.x, self.dictionary.pre_activations
        if not self.dictionary.estimates or not len(sample):
            return

        def smoothed(width: float) -> Tensor:
            narrower = Smoothing(min(width, self.smoothing.width), sample)
            return encoded(narrower(Batch.of(sample), self.draws(self.steps, CALIBRATING)).x)

        pre = encoded(sample)
        calibrated = self.dictionary.activation.calibrated(pre, parameters)
        calibrated |= self.penalty.calibrated(pre, parameters, smoothed)
        for name, value in calibrated.items():
            parameters[name].copy_(value)

    def record(self) -> dict[str, float]:
        """Own measures for `metrics.jsonl` and the final summary."""
        return {"revived": self.revived}

    def notes(self) -> list[str]:
        """Sentences for the user at the end of training."""
        return []

    def sae(self) -> SAE:
        """The current SAE, acting on normalised rows."""
        return self.dictionary.sae().without_training_parameters()

    def draws(self, number: int, kind: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(
            ((self.task.training.seed * 7 + kind) * 1_000_000_007 + number) % 2**63
        )

    def state(self) -> dict[str, Tensor]:
        """All tensors needed to resume; called by all processes together."""
        own = {
            f"dictionary.{name}": tensor for name, tensor in self.dictionary.state_dict().items()
        }
        held = {f"held.{name}": tensor for name, tensor in self._held.items()}
        counts = {"steps": self.steps, "revived": self.revived, "batches": self.batches}
        numbers = {name: torch.tensor(count) for name, count in counts.items()}
        return own | self.optimizer.state() | held | numbers

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.steps, self.revived = int(state["steps"]), int(state["revived"])
        self.batches = int(state["batches"])
        with torch.no_grad():
            for name, tensor in self.dictionary.state_dict().items():
                tensor.copy_(state[f"dictionary.{name}"])
        self.optimizer.restore(state)
        self._held = {name: state[f"held.{name}"].to(held) for name, held in self._held.items()}


def sgd(initial: SAE, task: Task, config: Sgd, communicator: Communicator = ALONE) -> "SgdSolver":
    start = initial.sae()
    return SgdSolver(
        Coupled(start, 1.0, None, task.B) if config.tied else start, task, config, communicator
    )


class SgdSolver(Solver):
    """Encoder and decoder by descent together."""

    def __init__(
        self, dictionary: Dictionary, task: Task, config: Sgd, communicator: Communicator = ALONE
    ) -> None:
        looks = max(1, round(task.batches * config.rounds * REVIVALS / task.steps))
        super().__init__(
            dictionary, (), task, config, math.ceil(task.batches / looks), communicator
        )
        self._forget_firing()

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._forget_firing()

    def step(self, batch: Batch) -> list[StepReport]:
        reports = super().step(batch)
        if (
            self.batches % self.every == 0
            and self.batches < self.task.batches
            and not self.finished
        ):
            self._revive_silent()
        return reports

    def trained(self, codes: Codes, rows: int) -> None:
        self._seen += rows
        self._fired |= codes.fired()

    def end_epoch(self) -> list[StepReport]:
        reports = super().end_epoch()
        self._revive_silent()
        self.hold_encoder()
        return reports

    def _revive_silent(self) -> None:
        if self.config.revive:
            fired = self.communicator.all_reduce(self._fired.to(torch.int32)) > 0
            self.revive(fired, self._seen)
        self._forget_firing()

    def _forget_firing(self) -> None:
        self._seen, self._fired = 0, torch.zeros_like(self.dictionary.b_enc, dtype=torch.bool)

    def state(self) -> dict[str, Tensor]:
        fired = self.communicator.all_reduce(self._fired.to(torch.int32))
        return super().state() | {"seen": torch.tensor(self._seen), "fired": fired}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._seen, self._fired = int(state["seen"]), state["fired"].to(self._fired.device) > 0


class Adam:
    """`torch.optim.Adam` with its defaults, fused, on the named tensors that need a gradient.

    It is called as a function, since the class imports torch's compiler, which takes a second and is not used.
    `clip_norm` limits the norm of all gradients together; `all_reduce` sums those of several processes.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        clip_norm: float | None = None,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.clip_norm, self.all_reduce = clip_norm, all_reduce
        self.tensors: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._square: dict[str, Tensor] = {}
        self._steps: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                self.include(name, tensor)

    def include(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor
        # The fused step needs a tensor and its moments to have the same strides.
        self._average[name], self._square[name] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        self._steps[name] = torch.zeros((), device=tensor.device)

    def zero_grad(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        if self.all_reduce is None:
            found = {
                name: tensor.grad
                for name, tensor in self.tensors.items()
                if tensor.grad is not None
            }
        else:
            found = self._reduced(self.all_reduce)
        if self.clip_norm is not None:
            norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
            for gradient in found.values():
                gradient *= (self.clip_norm / norm).clamp(max=1.0)
        adam(
            [self.tensors[name] for name in found],
            [*found.values()],
            [self._average[name] for name in found],
            [self._square[name] for name in found],
            [],
            [self._steps[name] for name in found],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=lr,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

    def _reduced(self, all_reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """All gradients, in one buffer."""
        tensors = self.tensors
        flat = all_reduce(
            torch.cat(
                [
                    tensor.new_zeros(tensor.numel())
                    if tensor.grad is None
                    else tensor.grad.reshape(-1)
                    for tensor in tensors.values()
                ]
            )
        )
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        return {
            name: torch.empty_like(tensor).copy_(part.view_as(tensor))  # with the tensor's strides
            for (name, tensor), part in zip(tensors.items(), parts, strict=True)
        }

    def state(self) -> dict[str, Tensor]:
        kept = {"step": self._steps, "exp_avg": self._average, "exp_avg_sq": self._square}
        return {
            f"adam.{key}.{name}": value
            for key, values in kept.items()
            for name, value in values.items()
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, own in self.state().items():
            own.copy_(state[name])

    @torch.no_grad()
    def forget(
        self, latents: Tensor, others: Tensor, dimension: Callable[[str], int | None]
    ) -> None:
        """Reset the moments of re-aimed latents, a mask (F,): the first to 0, the second to the mean of other latents,
        a mask, (F,).

        The second moment of a latent without gradient for long would make its first steps several times lr.
        """
        for name in self.tensors:
            if (along := dimension(name)) is None:
                continue
            average, square = (
                moments[name].movedim(along, -1) for moments in (self._average, self._square)
            )
            average.masked_fill_(
                latents, 0
            )  # unlike indexing by a mask, masked_fill does not synchronise
            mean = square.masked_fill(~others, 0).sum(-1, keepdim=True) / others.sum()
            square.copy_(torch.where(latents, mean, square))

    @torch.no_grad()
    def rescale(self, factors: Mapping[str, float]) -> None:
        """Follow tensors that were multiplied by a factor each: gradients shrink by it."""
        for name in self.tensors:
            self._average[name] /= factors[name]
            self._square[name] /= factors[name] ** 2

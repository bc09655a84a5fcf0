"""What takes a solver's descent steps: Adam, plain gradient descent, or L-BFGS on all rows at once; and schedules.

To add an optimiser, write its class here and a line in `OPTIMIZERS`; nothing else branches on an optimiser's name.

A schedule of weights is a number; `A:B`, geometric from A at the first outer iteration to B at the last; or `A,B,C`,
one value per outer iteration, of which the last holds on. Outer iterations are counted from 0. Source: the paper's
Algorithm 3.1, whose proximal weights carry the index of the outer iteration.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from ..errors import ConfigError
from ..ridge import AllReduce

CHOICE_GROWTH = 1.25  # ratio of the outer iterations at which alpha is chosen anew, once there are several
SPELLING = "a number, FIRST:LAST with both above 0, or numbers of at least 0 with commas between them"


def check_schedule(text: str) -> None:
    """Refuse the spelling of what is no plain number; ValueError where it is no schedule, whose message completes "the
    option must be"."""
    try:
        values = _values(text)
    except ValueError:
        raise ValueError(SPELLING) from None
    if not all(math.isfinite(value) and (value > 0 or (value == 0 and ":" not in text)) for value in values):
        raise ValueError(SPELLING)


def weight_at(schedule: float | str, outer: int, outers: int) -> float:
    """The weight of one of so many outer iterations, by a number or a text that `check_schedule` lets pass."""
    if not isinstance(schedule, str):
        return schedule
    values = _values(schedule)
    if ":" not in schedule:
        return values[min(outer, len(values) - 1)]
    first, last = values
    share = min(1.0, outer / (outers - 1)) if outers > 1 else 0.0
    return math.exp((1 - share) * math.log(first) + share * math.log(last))


def _values(text: str) -> list[float]:
    values = [float(part) for part in text.split(":" if ":" in text else ",")]
    if len(values) < 2 or (":" in text and len(values) != 2):
        raise ValueError(text)
    return values


def is_choosing_step(outer: int) -> bool:
    """Whether alpha is chosen anew at an outer iteration, counted from 0: at the first few, then ever more rarely,
    since it moves ever more slowly and choosing costs about a solve."""
    choice = 0
    while choice < outer:
        choice = max(choice + 1, math.floor(CHOICE_GROWTH * choice))
    return choice == outer


def outer_iterations(batches: int, per_epoch: int, every: float) -> int:
    """How many decoder steps so many batches of training come to, the last one of each epoch included; `every` batches
    within an epoch, infinite for none."""
    every = min(every, per_epoch)
    epochs, rest = divmod(batches, per_epoch)
    return epochs * math.ceil(per_epoch / every) + math.ceil(rest / every)


LBFGS_STEPS = 100  # quasi-Newton iterations after which a subproblem is left as it is
LBFGS_PAIRS = 20  # of a step and the gradient's change over it, that stand for the Hessian
TOLERANCE = 1e-9  # of the gradient's largest entry, and of the change of loss and weights, at which it is solved


class Optimizer:
    """Lowers a loss by moving tensors.

    `to_tolerance` says whether one step solves the problem that a batch poses, which must then stay the same one: no
    learning rate or penalty rises and no row moves from step to step. `vectors` says how many numbers are kept for
    each trained weight, besides itself and its gradient.

    Args:
        tensors: what to move, by name; those that need no gradient stay.
        clip_norm: the gradient of all of them together is scaled down to this norm where it is larger.
        all_reduce: puts the sum over the processes whose losses add up to the one that is lowered into a tensor; None
            for one process.
    """

    name: ClassVar[str]
    to_tolerance: ClassVar[bool] = False
    vectors: ClassVar[int] = 0

    def __init__(self, tensors: Mapping[str, Tensor], clip_norm: float = math.inf,
                 all_reduce: AllReduce | None = None) -> None:
        self.tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        self.clip_norm = clip_norm
        self.all_reduce = all_reduce

    @classmethod
    def check(cls, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse settings that cannot work with it.

        Args:
            rows: number of training rows.
            batch_size: rows in a batch.
            lr: the learning rate, or `auto`.
            smoothing: the width of smoothing, or `auto`.

        Raises:
            ConfigError: they cannot.
        """

    def descend(self, loss: Callable[[], Tensor], lr: float) -> None:
        """Lower a loss, differentiable, which is evaluated where the tensors are first of all, at a learning rate."""
        raise TypeError(f"{type(self).__name__} does not say how it descends")

    def _gradients(self, value: Tensor) -> list[Tensor | None]:
        """The gradient of a loss in each tensor, None where it has none; of several processes' losses together."""
        return self._all_reduced(torch.autograd.grad(value, list(self.tensors.values()), allow_unused=True))

    @torch.no_grad()
    def _all_reduced(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sum of all processes' gradients, by way of one buffer; those of one process as they are."""
        if self.all_reduce is None:
            return list(gradients)
        tensors = list(self.tensors.values())
        flat = self.all_reduce(torch.cat([
            tensor.new_zeros(tensor.numel()) if gradient is None else gradient.reshape(-1)
            for tensor, gradient in zip(tensors, gradients, strict=True)]))
        return [torch.empty_like(tensor).copy_(total.view_as(tensor))  # lies in memory as the tensor does
                for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True)]

    def _summed(self, value: Tensor) -> Tensor:
        """A loss without its gradient, of several processes together."""
        value = value.detach().clone()
        return value if self.all_reduce is None else self.all_reduce(value)

    @torch.no_grad()
    def _clip(self, gradients: Sequence[Tensor | None]) -> None:
        """Scale gradients down, in place, to `clip_norm` together."""
        if self.clip_norm == math.inf:
            return
        present = [gradient for gradient in gradients if gradient is not None]
        norm = torch.stack([gradient.norm() for gradient in present]).norm()
        for gradient in present:
            gradient *= (self.clip_norm / norm).clamp(max=1.0)

    def state(self) -> dict[str, Tensor]:
        """All that it keeps from one step to the next, by name."""
        return {}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned, among other entries: each where its own one lies, on the same device."""
        for name, own in self.state().items():
            own.copy_(state[name])

    def forget(self, latents: Tensor, dimension: Callable[[str], int | None]) -> None:
        """Drop momentum of latents, a mask (F,), that were moved by other means; `dimension` gives that of a tensor
        that latents are along, by its name."""

    def rescale(self, factor: float) -> None:
        """Keep in step with tensors that were multiplied by a factor, the loss staying the same."""


class Adam(Optimizer):
    """`torch.optim.Adam` with its defaults, in one pass over each tensor.

    Called as a function: the class imports torch's compiler, which takes a second and is not used.
    """

    name = "adam"
    vectors = 2

    def __init__(self, tensors: Mapping[str, Tensor], clip_norm: float = math.inf,
                 all_reduce: AllReduce | None = None) -> None:
        super().__init__(tensors, clip_norm, all_reduce)
        # The fused step reads a tensor and its moments alike, which must lie alike in memory.
        self._average = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self._square = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self._steps = {name: torch.zeros((), device=tensor.device) for name, tensor in self.tensors.items()}

    def descend(self, loss: Callable[[], Tensor], lr: float) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None
        loss().backward()
        gradients = self._all_reduced([tensor.grad for tensor in self.tensors.values()])
        self._clip(gradients)
        found = {name: gradient for name, gradient in zip(self.tensors, gradients, strict=True) if gradient is not None}
        with torch.no_grad():
            adam([self.tensors[name] for name in found], [*found.values()], [self._average[name] for name in found],
                 [self._square[name] for name in found], [], [self._steps[name] for name in found], fused=True,
                 amsgrad=False, beta1=0.9, beta2=0.999, lr=lr, weight_decay=0.0, eps=1e-8, maximize=False)

    def state(self) -> dict[str, Tensor]:
        """Its step count and two moments of each tensor."""
        kept = {"step": self._steps, "exp_avg": self._average, "exp_avg_sq": self._square}
        return {f"adam.{key}.{name}": value for key, values in kept.items() for name, value in values.items()}

    @torch.no_grad()
    def forget(self, latents: Tensor, dimension: Callable[[str], int | None]) -> None:
        """Zero the first moment, which points to where the latents were going, and give the second the mean of the
        other latents': that of a latent which had no gradient for long would make its first steps several times lr."""
        for name in self.tensors:
            if (along := dimension(name)) is None:
                continue
            average, square = (moments[name].movedim(along, -1) for moments in (self._average, self._square))
            average.masked_fill_(latents, 0)  # masks that are filled, not looked up, keep the host from waiting
            mean = square.masked_fill(latents, 0).sum(-1, keepdim=True) / (~latents).sum()
            square.copy_(torch.where(latents, mean, square))

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Gradients shrink as what they belong to grows."""
        for name in self.tensors:
            self._average[name] /= factor
            self._square[name] /= factor**2


class GradientDescent(Optimizer):
    """`theta - lr * gradient`, without momentum: the line of the paper's algorithm.

    It keeps how far the tensors were rescaled, and steps as if they never had been.
    """

    name = "sgd"

    def __init__(self, tensors: Mapping[str, Tensor], clip_norm: float = math.inf,
                 all_reduce: AllReduce | None = None) -> None:
        super().__init__(tensors, clip_norm, all_reduce)
        self._scale = torch.ones((), dtype=torch.float64)

    @classmethod
    def check(cls, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse `--lr auto`, by a ConfigError."""
        if lr == "auto":
            raise ConfigError("lr", "auto is fitted to Adam and says nothing of the step of {optimizer} sgd",
                              "give one, such as {lr} 0.01, or use {optimizer} adam")

    def descend(self, loss: Callable[[], Tensor], lr: float) -> None:
        gradients = self._gradients(loss())
        self._clip(gradients)
        with torch.no_grad():
            for tensor, gradient in zip(self.tensors.values(), gradients, strict=True):
                if gradient is not None:
                    tensor -= lr * self._scale.item() ** 2 * gradient

    def state(self) -> dict[str, Tensor]:
        """The product of all factors."""
        return {"sgd.scale": self._scale}

    def rescale(self, factor: float) -> None:
        """A gradient is 1 / factor as large where its tensor is factor times as large, and its step should be too."""
        self._scale *= factor


class Lbfgs(Optimizer):
    """The subproblem solved to tolerance on all rows: L-BFGS with a strong Wolfe line search.

    It starts afresh at every call, since the decoder step in between makes the loss another one, and what was learnt
    of the curvature of the one before does not hold for it. So it keeps nothing, and rescaling leaves it as it is.
    """

    name = "lbfgs"
    to_tolerance = True
    vectors = 2 * LBFGS_PAIRS + 6

    @classmethod
    def check(cls, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse batches, a learning rate and smoothing, by a ConfigError."""
        if batch_size < rows:
            raise ConfigError("optimizer", "lbfgs takes all training rows as one batch, and there are {rows}, more "
                                           "than {batch_size} {given}",
                              "give {batch_size} {rows}, or use {optimizer} adam", rows=rows, given=batch_size)
        if lr != "auto":
            raise ConfigError("lr", "does nothing with {optimizer} lbfgs, whose line search finds its steps",
                              "leave it out, or use {optimizer} adam or sgd")
        if smoothing not in ("auto", 0):
            raise ConfigError("smoothing", "cannot be used with {optimizer} lbfgs, which solves one problem over the "
                                           "rows as they are", "leave it out, or use {optimizer} adam")

    def descend(self, loss: Callable[[], Tensor], lr: float) -> None:
        """Iterate until nothing changes any more, whatever the learning rate; the loss never ends above its start."""
        begun = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        solver = torch.optim.LBFGS(self.tensors.values(), lr=1.0, max_iter=LBFGS_STEPS, history_size=LBFGS_PAIRS,
                                   tolerance_grad=TOLERANCE, tolerance_change=TOLERANCE, line_search_fn="strong_wolfe")

        def evaluate() -> Tensor:
            value = loss()
            for tensor, gradient in zip(self.tensors.values(), self._gradients(value), strict=True):
                tensor.grad = None if gradient is None else gradient.contiguous()  # torch's L-BFGS takes no other
            return self._summed(value)

        before = solver.step(evaluate).detach()
        with torch.no_grad():
            # At a kink, or by rounding, a line search can end higher.
            if not self._summed(loss()) <= before:
                for name, tensor in self.tensors.items():
                    tensor.copy_(begun[name])
                loss()  # whoever gave it sees the codes of where the tensors are


OPTIMIZERS: dict[str, type[Optimizer]] = {kind.name: kind for kind in (Adam, GradientDescent, Lbfgs)}

"""Optimisers of the descent steps: Adam, plain gradient descent, or L-BFGS on all rows at once; and weight schedules.

To add an optimiser, write its class here and a line in `OPTIMIZERS`; nothing else branches on an optimiser's name.

A schedule of weights is a number; `A:B`, geometric from A at the first outer iteration to B at the last; or `A,B,C`,
one value per outer iteration, and the last from then on. Outer iterations are counted from 0. Source: the paper's
Algorithm 3.1, whose proximal weights are indexed by the outer iteration.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from ..base.errors import ConfigError
from .ridge import AllReduce

CHOICE_GROWTH = 1.25  # ratio of the outer iterations at which alpha is chosen anew, once there are several


def is_choosing_step(outer: int) -> bool:
    """Whether alpha is chosen anew at an outer iteration: at the first few, then less and less often, since it changes
    less and less and choosing costs about a solve."""
    choice = 0
    while choice < outer:
        choice = max(choice + 1, math.floor(CHOICE_GROWTH * choice))
    return choice == outer


def outer_iterations(batches: int, per_epoch: int, every: float) -> int:
    """The number of decoder steps in training on `batches` batches: every `every` batches within an epoch, infinite for
    none, and one at the end of each epoch."""
    every = min(every, per_epoch)
    epochs, rest = divmod(batches, per_epoch)
    return epochs * math.ceil(per_epoch / every) + math.ceil(rest / every)


LBFGS_STEPS = 100  # quasi-Newton iterations at most
LBFGS_PAIRS = 20  # pairs of a step and the gradient's change that approximate the Hessian
TOLERANCE = 1e-9  # of the gradient's largest entry, and of the change of loss and weights


class Optimizer:
    """Lowers a loss by moving tensors.

    `to_tolerance`: whether one step solves the problem of its batch, which must then stay the same: no schedule of
    learning rate or penalty, no smoothing. `vectors`: numbers kept per trained weight, besides the weight and its
    gradient.

    Args:
        tensors: to move, by name; those that need no gradient stay.
        clip_norm: the gradient of all of them together is scaled down to at most this norm.
        all_reduce: sums a tensor over the processes, whose losses sum to the loss; None for one process.
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
        """Refuse settings that cannot work with the optimiser.

        Args:
            rows: number of training rows.
            batch_size: rows in a batch.
            lr: the learning rate, or `auto`.
            smoothing: the width of smoothing, or `auto`.

        Raises:
            ConfigError: they cannot.
        """

    def descend(self, loss: Callable[[], Tensor], lr: float) -> None:
        """Lower a differentiable loss, which is first evaluated at the current tensors."""
        raise TypeError(f"{type(self).__name__} does not say how it descends")

    def _gradients(self, value: Tensor) -> list[Tensor | None]:
        """The gradient of a loss, summed over processes, in each tensor; None if it has none."""
        return self._all_reduced(torch.autograd.grad(value, list(self.tensors.values()), allow_unused=True))

    @torch.no_grad()
    def _all_reduced(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients, all-reduced in one buffer if there are several processes."""
        if self.all_reduce is None:
            return list(gradients)
        tensors = list(self.tensors.values())
        flat = self.all_reduce(torch.cat([
            tensor.new_zeros(tensor.numel()) if gradient is None else gradient.reshape(-1)
            for tensor, gradient in zip(tensors, gradients, strict=True)]))
        return [torch.empty_like(tensor).copy_(total.view_as(tensor))  # with the tensor's strides
                for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True)]

    def _summed(self, value: Tensor) -> Tensor:
        """A loss, detached, summed over processes."""
        value = value.detach().clone()
        return value if self.all_reduce is None else self.all_reduce(value)

    @torch.no_grad()
    def _clip(self, gradients: Sequence[Tensor | None]) -> None:
        """Clip the norm of all gradients together to `clip_norm`, in place."""
        if self.clip_norm == math.inf:
            return
        present = [gradient for gradient in gradients if gradient is not None]
        norm = torch.stack([gradient.norm() for gradient in present]).norm()
        for gradient in present:
            gradient *= (self.clip_norm / norm).clamp(max=1.0)

    def state(self) -> dict[str, Tensor]:
        """The tensors kept from one step to the next, by name."""
        return {}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        """Resume from the tensors of `state`, among others; each is copied into the optimiser's own."""
        for name, own in self.state().items():
            own.copy_(state[name])

    def forget(self, latents: Tensor, dimension: Callable[[str], int | None]) -> None:
        """Reset the moments of latents, a mask (F,), that were moved otherwise; `dimension` gives the latent dimension
        of a tensor, by name."""

    def include(self, name: str, tensor: Tensor) -> None:
        """Move another tensor, which needs a gradient, from now on."""
        self.tensors[name] = tensor

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Keep in step with tensors that were multiplied by a factor each, the loss staying the same."""


class Adam(Optimizer):
    """`torch.optim.Adam` with its defaults, fused.

    Called as a function: the class imports torch's compiler, which takes a second and is not used.
    """

    name = "adam"
    vectors = 2

    def __init__(self, tensors: Mapping[str, Tensor], clip_norm: float = math.inf,
                 all_reduce: AllReduce | None = None) -> None:
        super().__init__(tensors, clip_norm, all_reduce)
        # The fused step needs a tensor and its moments to have the same strides.
        self._average: dict[str, Tensor] = {}
        self._square: dict[str, Tensor] = {}
        self._steps: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            self.include(name, tensor)

    def include(self, name: str, tensor: Tensor) -> None:
        super().include(name, tensor)
        self._average[name], self._square[name] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        self._steps[name] = torch.zeros((), device=tensor.device)

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
        """The step count and two moments of each tensor."""
        kept = {"step": self._steps, "exp_avg": self._average, "exp_avg_sq": self._square}
        return {f"adam.{key}.{name}": value for key, values in kept.items() for name, value in values.items()}

    @torch.no_grad()
    def forget(self, latents: Tensor, dimension: Callable[[str], int | None]) -> None:
        """Zero the first moment, and set the second to the mean of the other latents': the second moment of a latent
        without gradient for long is so small that its first steps would be several times lr."""
        for name in self.tensors:
            if (along := dimension(name)) is None:
                continue
            average, square = (moments[name].movedim(along, -1) for moments in (self._average, self._square))
            average.masked_fill_(latents, 0)  # unlike indexing by a mask, masked_fill does not synchronise
            mean = square.masked_fill(latents, 0).sum(-1, keepdim=True) / (~latents).sum()
            square.copy_(torch.where(latents, mean, square))

    @torch.no_grad()
    def rescale(self, factors: Mapping[str, float]) -> None:
        """Gradients shrink by the factor by which tensors grow."""
        for name in self.tensors:
            self._average[name] /= factors[name]
            self._square[name] /= factors[name] ** 2


class GradientDescent(Optimizer):
    """`theta - lr * gradient`, without momentum, as in the paper's algorithm.

    It keeps the product of all rescaling factors, and steps as if tensors had never been rescaled.
    """

    name = "sgd"

    def __init__(self, tensors: Mapping[str, Tensor], clip_norm: float = math.inf,
                 all_reduce: AllReduce | None = None) -> None:
        super().__init__(tensors, clip_norm, all_reduce)
        self._scales = {name: torch.ones((), dtype=torch.float64) for name in self.tensors}

    def include(self, name: str, tensor: Tensor) -> None:
        super().include(name, tensor)
        self._scales[name] = torch.ones((), dtype=torch.float64)

    @classmethod
    def check(cls, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse `--lr auto`, by a ConfigError."""
        if lr == "auto":
            raise ConfigError("--lr auto is fitted to Adam and says nothing of the step of --optimizer sgd; give "
                              "one, such as --lr 0.01, or use --optimizer adam", option="lr")

    def descend(self, loss: Callable[[], Tensor], lr: float) -> None:
        gradients = self._gradients(loss())
        self._clip(gradients)
        with torch.no_grad():
            for (name, tensor), gradient in zip(self.tensors.items(), gradients, strict=True):
                if gradient is not None:
                    tensor -= lr * self._scales[name].item() ** 2 * gradient

    def state(self) -> dict[str, Tensor]:
        """The product of each tensor's factors."""
        return {f"sgd.scale.{name}": scale for name, scale in self._scales.items()}

    def rescale(self, factors: Mapping[str, float]) -> None:
        """A tensor `factor` times as large has gradients 1 / factor as large, and wants steps factor times as large."""
        for name, scale in self._scales.items():
            scale *= factors[name]


class Lbfgs(Optimizer):
    """The subproblem solved to tolerance on all rows: L-BFGS with a strong Wolfe line search.

    It starts afresh at every call and keeps nothing, since the decoder step in between changes the loss and its
    curvature.
    """

    name = "lbfgs"
    to_tolerance = True
    vectors = 2 * LBFGS_PAIRS + 6

    @classmethod
    def check(cls, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse batches, a learning rate and smoothing, by a ConfigError."""
        if batch_size < rows:
            raise ConfigError(f"--optimizer lbfgs takes all training rows as one batch, and there are {rows}, more "
                              f"than --batch-size {batch_size}; give --batch-size {rows}, or use --optimizer adam",
                              option="optimizer")
        if lr != "auto":
            raise ConfigError("--lr does nothing with --optimizer lbfgs, whose line search finds its steps; leave it "
                              "out, or use --optimizer adam or sgd", option="lr")
        if smoothing not in ("auto", 0):
            raise ConfigError("--smoothing cannot be used with --optimizer lbfgs, which solves one problem over the "
                              "rows as they are; leave it out, or use --optimizer adam", option="smoothing")

    def descend(self, loss: Callable[[], Tensor], lr: float) -> None:
        """Iterate to tolerance, whatever the learning rate; the loss never ends above its start."""
        begun = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        solver = torch.optim.LBFGS(self.tensors.values(), lr=1.0, max_iter=LBFGS_STEPS, history_size=LBFGS_PAIRS,
                                   tolerance_grad=TOLERANCE, tolerance_change=TOLERANCE, line_search_fn="strong_wolfe")

        def evaluate() -> Tensor:
            value = loss()
            for tensor, gradient in zip(self.tensors.values(), self._gradients(value), strict=True):
                tensor.grad = None if gradient is None else gradient.contiguous()  # torch's L-BFGS needs it
            return self._summed(value)

        before = solver.step(evaluate).detach()
        with torch.no_grad():
            # At a kink, or by rounding, a line search can end higher.
            if not self._summed(loss()) <= before:
                for name, tensor in self.tensors.items():
                    tensor.copy_(begun[name])
                loss()  # so that the caller has the codes at the restored tensors


OPTIMIZERS: dict[str, type[Optimizer]] = {kind.name: kind for kind in (Adam, GradientDescent, Lbfgs)}

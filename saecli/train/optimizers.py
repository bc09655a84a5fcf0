"""Adam over named tensors, with all-reduced and clipped gradients."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam

from .ridge import AllReduce


class Adam:
    """`torch.optim.Adam` with its defaults, fused. Called as a function: the class imports torch's compiler, which
    takes a second and is not used.

    Args:
        tensors: to move, by name; those that need no gradient stay.
        clip_norm: the gradient of all of them together is scaled down to at most this norm; None for no limit.
        all_reduce: sums a tensor over the processes, whose losses sum to the loss; None for one process.
    """

    def __init__(self, tensors: Mapping[str, Tensor], clip_norm: float | None = None,
                 all_reduce: AllReduce | None = None) -> None:
        self.clip_norm, self.all_reduce = clip_norm, all_reduce
        self.tensors: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._square: dict[str, Tensor] = {}
        self._steps: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                self.include(name, tensor)

    def include(self, name: str, tensor: Tensor) -> None:
        """Move another tensor, which needs a gradient, from now on."""
        self.tensors[name] = tensor
        # The fused step needs a tensor and its moments to have the same strides.
        self._average[name], self._square[name] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        self._steps[name] = torch.zeros((), device=tensor.device)

    def zero_grad(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move each tensor that has a gradient."""
        found = self._gradients()
        if self.clip_norm is not None:
            norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
            for gradient in found.values():
                gradient *= (self.clip_norm / norm).clamp(max=1.0)
        adam([self.tensors[name] for name in found], [*found.values()], [self._average[name] for name in found],
             [self._square[name] for name in found], [], [self._steps[name] for name in found], fused=True,
             amsgrad=False, beta1=0.9, beta2=0.999, lr=lr, weight_decay=0.0, eps=1e-8, maximize=False)

    def _gradients(self) -> dict[str, Tensor]:
        """All-reduced in one buffer if there are several processes."""
        if self.all_reduce is None:
            return {name: tensor.grad for name, tensor in self.tensors.items() if tensor.grad is not None}
        tensors = self.tensors
        flat = self.all_reduce(torch.cat([
            tensor.new_zeros(tensor.numel()) if tensor.grad is None else tensor.grad.reshape(-1)
            for tensor in tensors.values()]))
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        return {name: torch.empty_like(tensor).copy_(part.view_as(tensor))  # with the tensor's strides
                for (name, tensor), part in zip(tensors.items(), parts, strict=True)}

    def state(self) -> dict[str, Tensor]:
        """The step count and two moments of each tensor."""
        kept = {"step": self._steps, "exp_avg": self._average, "exp_avg_sq": self._square}
        return {f"adam.{key}.{name}": value for key, values in kept.items() for name, value in values.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, own in self.state().items():
            own.copy_(state[name])

    @torch.no_grad()
    def forget(self, latents: Tensor, dimension: Callable[[str], int | None]) -> None:
        """Reset the moments of latents, a mask (F,), that were moved otherwise: zero the first, and set the second to
        the mean of the other latents', by each tensor's latent dimension. The second moment of a latent without
        gradient for long is so small that its first steps would be several times lr."""
        for name in self.tensors:
            if (along := dimension(name)) is None:
                continue
            average, square = (moments[name].movedim(along, -1) for moments in (self._average, self._square))
            average.masked_fill_(latents, 0)  # unlike indexing by a mask, masked_fill does not synchronise
            mean = square.masked_fill(latents, 0).sum(-1, keepdim=True) / (~latents).sum()
            square.copy_(torch.where(latents, mean, square))

    @torch.no_grad()
    def rescale(self, factors: Mapping[str, float]) -> None:
        """Keep in step with tensors that were multiplied by a factor each, the loss staying the same: gradients shrink
        by it."""
        for name in self.tensors:
            self._average[name] /= factors[name]
            self._square[name] /= factors[name] ** 2

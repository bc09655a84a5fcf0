"""Adam on named tensors, with what training SAEs needs of it: re-aimed latents, rescaled tensors, several processes."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

# Torch's default of the second, 0.999, averages over 1,000 steps: more than there are between two decoder steps. FVU on
# SmolLM2-135M, L0 32, with 0.999 and with 0.99: pam-sgd topk 0.177, 0.173, batchtopk 0.178, 0.172, jumprelu 0.180,
# 0.177; sgd topk 0.180, 0.179, batchtopk 0.180, 0.175. 0.95 and 0.97 are as good.
BETAS = (0.9, 0.99)


class Adam:
    """`torch.optim.Adam`, fused, with `BETAS`, on the named tensors that need a gradient.

    `clip_norm` limits the norm of all gradients together; `all_reduce` sums those of several processes.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        clip_norm: float | None = None,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.clip_norm, self.all_reduce = clip_norm, all_reduce
        self.tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        self._adam = torch.optim.Adam([*self.tensors.values()], betas=BETAS, fused=True)
        self._begin(self.tensors)

    def include(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor
        self._adam.add_param_group({"params": [tensor]})
        self._begin([name])

    def _begin(self, names: Collection[str]) -> None:
        """Give tensors their state, which torch makes at their first step, so that it has one form to save."""
        for name in names:
            tensor = self.tensors[name]
            self._adam.state[tensor] = {
                "step": torch.zeros((), device=tensor.device),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        if self.all_reduce is not None:
            self._reduce_gradients(self.all_reduce)
        if self.clip_norm is not None:
            clip_grad_norm_([*self.tensors.values()], self.clip_norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()

    def _reduce_gradients(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Sum gradients over processes in one buffer; a process without rows contributes zeros."""
        tensors = self.tensors.values()
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors
        ]
        flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            # The fused step needs a tensor and its gradient to have the same strides.
            tensor.grad = torch.empty_like(tensor).copy_(part.view_as(tensor))

    def state(self) -> dict[str, Tensor]:
        return {
            f"adam.{key}.{name}": value
            for name, tensor in self.tensors.items()
            for key, value in self._adam.state[tensor].items()
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
        for name, tensor in self.tensors.items():
            latent_dimension = dimension(name)
            if latent_dimension is None:
                continue
            average = self._adam.state[tensor]["exp_avg"].movedim(latent_dimension, -1)
            square = self._adam.state[tensor]["exp_avg_sq"].movedim(latent_dimension, -1)
            # Unlike indexing by a mask, masked_fill does not synchronise.
            average.masked_fill_(latents, 0)
            mean = square.masked_fill(~others, 0).sum(-1, keepdim=True) / others.sum()
            square.copy_(torch.where(latents, mean, square))

"""How strongly a model's later blocks read each dimension of the residual stream: the weights of their norms.

A block reads the residual stream x through norms, before attention and before the MLP, each `g x / rms(x)`. Their
weights g differ between dimensions: from 1 to 119 in the last third of Gemma 3 270M, where those that vary much have
small ones. With rows scaled by the root of g (`--normalize model`) an SAE's error lies where the model looks least.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

LEAST = 1e-3  # of the mean over dimensions


@torch.no_grad()
def weights_read(norms: Iterable[nn.Module]) -> Tensor | None:
    """The root mean square, (D,), of the weights of norms; None without any but 0.

    The weight of a norm that multiplies by 1 plus its parameter (Gemma) is that sum.
    """
    factors = [_factor(norm) for norm in norms]
    if not factors:
        return None
    reads = torch.stack(factors).square().mean(0).sqrt()
    mean = reads.mean().item()
    return reads.clamp(min=LEAST * mean) if 0 < mean < torch.inf else None


def _factor(norm: nn.Module) -> Tensor:
    """What a norm multiplies each dimension by, (D,), read off its values at vectors of mean 0 and variance 1."""
    weight = norm.get_parameter("weight").float().cpu()
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    parameters = {name: torch.zeros_like(weight) for name, _ in norm.named_parameters()}
    parameters["weight"] = weight
    return functional_call(norm, parameters, (signs,)) * signs

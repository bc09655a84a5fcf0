"""Normalisation of the rows that an SAE is trained on; it is folded into the saved weights.

Shapes: B rows, D = d_in.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

NORMALISATIONS = ("scale", "standardize", "none")


@dataclass(frozen=True)
class Normalisation:
    """`(x - mean) / scale`.

    Args:
        mean: what is subtracted, (D,).
        scale: what is divided by, (D,), positive.
        variance: mean squared distance of the normalised training rows from their mean, a scalar.
    """

    mean: Tensor
    scale: Tensor
    variance: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name."""
        return {"mean": self.mean, "scale": self.scale, "variance": self.variance}

    def to(self, device: torch.device) -> "Normalisation":
        """A copy on another device."""
        return Normalisation(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised rows, (B, D), as a new tensor."""
        return (x - self.mean) / self.scale


def fit_normalisation(kind: str, batches: Iterable[Tensor], d_in: int, dtype: torch.dtype) -> Normalisation:
    """Measure the normalisation of rows in one pass.

    Args:
        kind: `none`; `scale`, centre and divide by one number, so that the mean squared norm is D; or
            `standardize`, centre and give each dimension unit variance, as the paper does.
        batches: all the rows, in batches (B, D).
        d_in: D.
        dtype: what the result is rounded to; the pass sums in float64.

    Returns:
        The normalisation; a dimension that does not vary is only centred.

    Raises:
        ConfigError: the rows do not vary at all, so that there is nothing to learn.
    """
    rows, mean, scatter = 0, torch.zeros(d_in, dtype=torch.float64), torch.zeros(d_in, dtype=torch.float64)
    for batch in batches:
        x = batch.double()
        shift = x.mean(0) - mean
        total = rows + len(x)
        scatter += (x - x.mean(0)).square().sum(0) + shift.square() * (rows * len(x) / total)
        mean += shift * (len(x) / total)
        rows = total
    variance = scatter / rows
    if variance.sum() == 0:
        raise ConfigError(f"all {rows} training rows are the same; expected rows that differ, give another --data")
    if kind == "none":
        mean, scale = torch.zeros_like(mean), torch.ones_like(mean)
    elif kind == "scale":
        scale = variance.mean().sqrt().expand(d_in)
    else:
        scale = torch.where(variance > 0, variance.sqrt(), 1.0)
    return Normalisation(mean.to(dtype), scale.to(dtype), (variance / scale.square()).sum().to(dtype))

"""Normalisation of the rows that an SAE is trained on; it is folded into the saved weights.

Shapes: B rows, D = d_in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from ..store import Spread

NORMALISATIONS = ("scale", "standardize", "none")
LEAST_SCALE = 1e-35  # weights for raw rows are divided by the scale, and float32 ends at 3.4e38


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


def fit_normalisation(kind: str, spread: Spread, dtype: torch.dtype) -> Normalisation:
    """The normalisation of rows of which mean and scatter are known.

    Args:
        kind: `none`; `scale`, centre and divide by one number, so that the mean squared norm is D; or
            `standardize`, centre and give each dimension unit variance, as the paper does.
        spread: that of the training rows alone: the held-out rows have no part in what is trained.
        dtype: what the result is rounded to.

    Returns:
        The normalisation; a dimension that does not vary, or by less than `LEAST_SCALE`, is only centred.

    Raises:
        ConfigError: the rows do not vary at all, so that there is nothing to learn, or by less than that.
    """
    mean, variance = torch.from_numpy(spread.mean), torch.from_numpy(spread.variance)
    if variance.sum() == 0:
        raise ConfigError(None, "there is nothing to learn: expected training rows that differ, got {rows}, all the "
                                "same", "give another {data}, or a larger {fraction}", rows=spread.rows)
    overall = variance.mean().sqrt()
    if overall < LEAST_SCALE:
        raise ConfigError(None, "the training rows are all but the same: expected a spread of {least:g} or more, which "
                                "weights in float32 can make up for, got {got:.2g}",
                          "multiply them, and import them again", least=LEAST_SCALE, got=overall.item())
    if kind == "none":
        mean, scale = torch.zeros_like(mean), torch.ones_like(mean)
    elif kind == "scale":
        scale = overall.expand_as(mean)
    else:
        scale = torch.where(variance.sqrt() > LEAST_SCALE, variance.sqrt(), 1.0)
    return Normalisation(mean.to(dtype), scale.to(dtype), (variance / scale.square()).sum().to(dtype))

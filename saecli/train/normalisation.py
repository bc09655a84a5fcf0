"""The normalisation of training rows, which is folded into the saved weights.

Shapes: B rows of a batch, D = d_in, E the width of targets beside the rows; 0 if the targets are the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..sae.dictionary import SAE
from ..store.statistics import Spread

LEAST_SCALE = 1e-35  # weights for raw rows are divided by the scale, and float32's maximum is 3.4e38


@dataclass(frozen=True)
class Normalisation:
    """`(x - mean) / scale`, of rows with their targets beside them if there are any.

    Args:
        mean: (D + E,).
        scale: (D + E,), positive.
        variance: mean squared distance of the normalised targets of training rows from their mean, a scalar.
        d_in: D.
    """

    mean: Tensor
    scale: Tensor
    variance: Tensor
    d_in: int

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {"mean": self.mean, "scale": self.scale, "variance": self.variance}

    def to(self, device: torch.device) -> "Normalisation":
        """A copy on another device."""
        return Normalisation(**{name: tensor.to(device) for name, tensor in self.tensors().items()}, d_in=self.d_in)

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised rows, (B, D + E), as a new tensor."""
        return (x - self.mean) / self.scale

    def of_sae(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `SAE.on_raw_rows`: mean and scale of rows, (D,), and of targets, (E,), which may be the
        rows."""
        D = self.d_in
        targets = slice(D, None) if len(self.mean) > D else slice(None)
        return self.mean[:D], self.scale[:D], self.mean[targets], self.scale[targets]


def fit_normalisation(kind: str, spread: Spread, dtype: torch.dtype, widths: Sequence[int] = (),
                      d_target: int = 0) -> Normalisation:
    """The normalisation of rows, given their mean and scatter.

    Args:
        kind: `none`; `scale`, centre and divide by one number, so that the mean squared norm is D, for each input and
            the target alone; or `standardize`, centre and give each dimension unit variance, as the paper does.
        spread: of the training rows alone, not of held-out rows, with their targets beside them.
        dtype: of the result.
        widths: of inputs side by side; none for one.
        d_target: E; 0 if the targets are the rows.

    Returns:
        The normalisation; a dimension that varies by less than `LEAST_SCALE` is only centred.

    Raises:
        ConfigError: the rows do not vary at all, so that there is nothing to learn, or by less than that.
    """
    mean, variance = torch.from_numpy(spread.mean), torch.from_numpy(spread.variance)
    d_in = len(mean) - d_target
    places = [*(widths or [d_in]), *([d_target] if d_target else [])]
    found = [_scale(kind, part, spread.rows) for part in variance.split(places)]
    mean, scale = (torch.zeros_like(mean) if kind == "none" else mean), torch.cat(found)
    of_targets = slice(d_in, None) if d_target else slice(None)
    left = (variance / scale.square())[of_targets].sum()
    return Normalisation(mean.to(dtype), scale.to(dtype), left.to(dtype), d_in)


def _scale(kind: str, variance: Tensor, rows: int) -> Tensor:
    """The scale of one place, (D,), from its variances; ConfigError as of `fit_normalisation`."""
    if variance.sum() == 0:
        raise ConfigError(f"there is nothing to learn: expected training rows that differ, got {rows}, all the same; "
                          "give another --data, or a larger --fraction")
    overall = variance.mean().sqrt()
    if overall < LEAST_SCALE:
        raise ConfigError(f"the training rows are all but the same: expected a spread of {LEAST_SCALE:g} or more, "
                          f"which weights in float32 can make up for, got {overall.item():.2g}; multiply them, and "
                          "import them again")
    if kind == "none":
        return torch.ones_like(variance)
    if kind == "scale":
        return overall.expand_as(variance)
    return torch.where(variance.sqrt() > LEAST_SCALE, variance.sqrt(), 1.0)


def on_raw_rows(sae: SAE, normalisation: Normalisation) -> SAE:
    """The SAE with the normalisation folded in, computed in float64."""
    folded = sae.copy_to(torch.float64).on_raw_rows(*(part.double() for part in normalisation.of_sae()))
    return folded.copy_to(sae.W_enc.dtype)

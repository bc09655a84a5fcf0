"""The metric of an SAE, in which it was trained: rows, and targets, divided by scales that its weights then hold."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Normalisation:
    """`(x - mean) / scale`, of rows with their targets next to them.

    That of an SAE on raw rows is about 0: `(y_hat - y) / target_scale` are the errors that its training minimised, and
    `W_dec / target_scale` its directions.
    """

    mean: Tensor  # (D + E,), as scale; in training (D,) if the targets are the rows
    scale: Tensor
    variance: Tensor  # mean squared distance of normalised training targets from their mean; NaN if unknown
    d_in: int
    kept: Tensor | None = None  # scale of the SAE's metric, (D + E,), if not this

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "scale": self.scale, "variance": self.variance}

    def to(self, where: torch.device | torch.dtype) -> "Normalisation":
        parts = {name: tensor.to(where) for name, tensor in self.tensors().items()}
        return Normalisation(**parts, d_in=self.d_in, kept=self.kept)

    def inverse(self) -> "Normalisation":
        return replace(self, mean=-self.mean / self.scale, scale=1 / self.scale)

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised rows, (B, D) or (B, D + E), as a new tensor."""
        width = x.shape[1]
        return (x - self.mean[:width]) / self.scale[:width]

    def of_sae(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and scale of rows, (D,), and of targets, (E,)."""
        D = self.d_in
        targets = slice(D, None) if len(self.mean) > D else slice(None)
        return self.mean[:D], self.scale[:D], self.mean[targets], self.scale[targets]

    @property
    def target_scale(self) -> Tensor:
        return self.of_sae()[3]

    @property
    def metric(self) -> str:
        """For tables: "training", or "raw" if FVU and cosines are raw targets'."""
        low, high = self.target_scale.aminmax()
        return "raw" if high == low else "training"

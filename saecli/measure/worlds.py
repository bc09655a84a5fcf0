"""How well an SAE has found the features that rows are made of.

Defined as in `sae_lens.synthetic.evals`, SAELens 6.54. Shapes: B rows, n entries, D = d_in, F = d_sae, G features.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from ..sae.codes import Codes, SparseCodes

LEAST_NORM = 1e-8  # a vector no longer than this has cosines of 0, or nearly so


@dataclass(frozen=True, eq=False)
class Alignment:
    """Cosines, (F, G), between decoder vectors and the directions of features; float32, on the CPU."""

    cosines: Tensor

    @classmethod
    def of(cls, W_dec: Tensor, directions: Tensor) -> "Alignment":
        """The alignment of a decoder, (F, D), with directions, (G, D)."""
        ours, theirs = (
            rows / rows.norm(dim=1, keepdim=True).clamp(min=LEAST_NORM)
            for rows in (W_dec.float(), directions.to(W_dec.device).float())
        )
        return cls((ours @ theirs.T).cpu())

    @cached_property
    def nearest(self) -> Tensor:
        """The feature that each latent is taken to detect, by the largest |cosine|, (F,), int64."""
        return self.cosines.abs().argmax(1)

    def mcc(self) -> float:
        """Mean |cosine| under the best one-to-one matching of latents and features, in [0, 1].

        Cost: the Hungarian algorithm, cubic in the smaller number at worst; some seconds at 4,096.
        """
        from scipy.optimize import linear_sum_assignment  # takes a fifth of a second to import

        sizes = self.cosines.abs().numpy()
        return float(sizes[linear_sum_assignment(sizes, maximize=True)].mean(dtype=np.float64))

    def uniqueness(self) -> float:
        """Number of features that are the nearest of some latent, over the number of latents, in (0, 1]."""
        return len(self.nearest.unique()) / len(self.nearest)


class FeatureScores:
    """Each latent as a detector of its nearest feature, counted over batches of rows.

        precision = TP / (TP + FP)    recall = TP / (TP + FN)    F1 = 2 precision recall / (precision + recall)

    of the rows on which the latent fires (its code is not 0) and on which its nearest feature does; 0 where the
    denominator is; each then a mean over all latents.
    """

    def __init__(self, alignment: Alignment, device: torch.device | str = "cpu") -> None:
        self.alignment, self.rows = alignment, 0
        self._nearest = alignment.nearest.to(device)
        latents, features = alignment.cosines.shape
        self._both, self._fired = (
            torch.zeros(latents, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._true = torch.zeros(features, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, z: Codes, truth: csr_array) -> None:
        """Count a batch of codes, (B, F), and the true codes of the same rows, (B, G)."""
        active = torch.from_numpy(truth.toarray() != 0).to(self._nearest.device)  # (B, G)
        if isinstance(z, SparseCodes):
            right = active[z.rows, self._nearest[z.indices]] & (z.values != 0)  # (n,)
            self._both.index_add_(0, z.indices, right.long())
        else:
            self._both += ((z.dense() != 0) & active[:, self._nearest]).sum(0)
        self._fired += z.latent_counts()
        self._true += active.sum(0)
        self.rows += truth.shape[0]

    def result(self) -> dict[str, Any]:
        """`mcc`, `f1`, `precision`, `recall` (means over the latents), `uniqueness`, and `true_l0`, the mean number of
        features active on a row, over all rows so far."""
        both, fired, true = (counts.double() for counts in (self._both, self._fired, self._true))
        precision, recall = both / fired.clamp(min=1), both / true[self._nearest].clamp(min=1)
        f1 = (
            2 * precision * recall / (precision + recall).clamp(min=torch.finfo(torch.float64).tiny)
        )
        return {
            "mcc": self.alignment.mcc(),
            "f1": float(f1.mean()),
            "precision": float(precision.mean()),
            "recall": float(recall.mean()),
            "uniqueness": self.alignment.uniqueness(),
            "true_l0": float(true.sum()) / self.rows,
        }

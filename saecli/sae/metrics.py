"""Reconstruction by an SAE and firing of its latents, accumulated over batches of rows in constant memory.

Sums are float64 on the batches' device: nothing synchronises with it until `result`. A latent fires on a row if its
code is not zero.
Shapes: B rows, D = d_in, E = d_out, F = d_sae, L prefixes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.devices import moved
from ..base.errors import ConfigError
from ..base.processes import ALONE, Communicator
from ..base.words import counted
from .codes import Codes, Prefixes
from .dictionary import Batch, Dictionary

Watch = Callable[[Codes], None]
Massive = Callable[[Tensor], Tensor]  # of rows, (B, E), those of massive norm, (B,) bool
MASSIVE_VARIANCE = 0.05  # fraction of the variance from which rows of massive norm are noted
CPU = torch.device("cpu")
DENSE_FREQUENCY = 0.1  # a latent that fires on a larger fraction of the rows counts as dense


class _Variance:
    """The scatter of rows about their mean, and the squared error of their reconstructions.

    Scatters are merged about the running mean (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances", 1979), precise also for a large mean.
    """

    def __init__(self, d_out: int, device: torch.device) -> None:
        # On the device: reading it would make the host wait for the GPU.
        self.rows = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(d_out, dtype=torch.float64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # scatter, squared error

    @property
    def fvu(self) -> float:
        return float(self.sums[1] / self.sums[0])

    def update(self, x: Tensor, errors: Tensor, taken: Tensor) -> None:
        """Rows, (B, E), and squared errors, (B,), float64, where `taken`, (B,), is 1, else 0."""
        count = taken.sum()
        total = self.rows + count
        mean = taken @ x / count.clamp(min=1)
        shift = mean - self.mean
        within = taken @ (x - mean).square().sum(1)
        between = shift.square().sum() * self.rows * count / total.clamp(min=1)
        self.sums += torch.stack([within + between, taken @ errors])
        self.mean += shift * (count / total.clamp(min=1))
        self.rows = total

    def all_reduce(self, communicator: Communicator) -> None:
        counts = communicator.all_reduce(torch.cat([self.mean * self.rows, self.rows[None]]))
        mean = counts[:-1] / counts[-1].clamp(min=1)
        # The scatter is now about the mean of all.
        self.sums[0] += self.rows * (self.mean - mean).square().sum()
        self.mean, self.rows = mean, counts[-1]
        communicator.all_reduce(self.sums)


class Reconstruction:
    """Errors of predictions `x_hat` of rows or targets `x` through codes `z`.

    fvu = E||x_hat - x||^2 / (E||x||^2 - ||E x||^2)
    """

    def __init__(
        self,
        d_out: int,
        d_sae: int,
        prefixes: Prefixes = (),
        massive: Massive | None = None,
        device: torch.device = CPU,
        scale: Tensor | float = 1.0,
    ) -> None:
        self._prefixes, self._massive, self._scale = prefixes, massive, scale
        self.rows = 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # cosine, l0, l1
        # Squared error, l0.
        self._nested = torch.zeros(2, len(prefixes), dtype=torch.float64, device=device)
        self._all = _Variance(d_out, device)
        self._ordinary = _Variance(d_out, device)  # of the rows that are not massive
        self._scaled = _Variance(d_out, device)  # of rows divided by the scale, (E,)
        self._fired = torch.zeros(d_sae, dtype=torch.bool, device=device)

    @torch.no_grad()
    def update(self, x: Tensor, x_hat: Tensor, z: Codes, by_prefix: Tensor | None = None) -> None:
        """Rows and reconstructions, (B, E), codes, (B, F), and reconstructions by prefix, (B, L, E)."""
        if not len(x):
            return
        self.rows += len(x)
        massive = None if self._massive is None else self._massive(x)
        x, x_hat = x.double(), x_hat.double()
        errors = (x_hat - x).square().sum(1)
        norms = (x.norm(dim=1) * x_hat.norm(dim=1)).clamp(min=torch.finfo(torch.float64).tiny)
        counts = z.latent_counts()
        cosines = (x * x_hat).sum(1) / norms
        self._sums += torch.stack([cosines.sum(), counts.sum().double(), z.l1()])
        if self._prefixes and by_prefix is not None:
            nested = (by_prefix.double() - x[:, None]).square().sum((0, 2))
            last = counts.new_tensor(self._prefixes) - 1
            self._nested += torch.stack([nested, counts.cumsum(0)[last].double()])
        self._fired |= counts > 0
        ones = torch.ones_like(errors)
        self._all.update(x, errors, ones)
        self._scaled.update(x / self._scale, ((x_hat - x) / self._scale).square().sum(1), ones)
        if massive is not None:
            self._ordinary.update(x, errors, (~massive).double())

    def all_reduce(self, communicator: Communicator) -> None:
        if communicator.world_size == 1:
            return
        for variance in (self._all, self._ordinary, self._scaled):
            variance.all_reduce(communicator)
        self.rows = int(self._all.rows)
        communicator.all_reduce(self._sums)
        communicator.all_reduce(self._nested)
        self._fired = communicator.all_reduce(self._fired.to(torch.int32)) > 0

    def result(self) -> dict[str, Any]:
        """The measures over all rows so far; ConfigError if there are none.

        All are of raw rows, but `metric_fvu`, the FVU of rows divided by the scale. `mse` is a mean over rows and
        dimensions; `fvu` is infinite or NaN if rows do not vary; `cosine` is 0 where a row or its reconstruction is;
        `l0` and `l1` are means over rows; `silent_fraction` counts latents that fire on no row; `prefixes`, of a nested
        SAE, have `latents`, `l0`, `fvu`. With `massive` also `massive_rows`, `massive_variance`, their fraction of the
        variance, and `ordinary_fvu`, the FVU of the others.
        """
        _demand_rows(self.rows)
        l0s, fvus = self._nested[1] / self.rows, self._nested[0] / self._all.sums[0]
        nested = [
            {"latents": latents, "l0": l0, "fvu": fvu}
            for latents, l0, fvu in zip(self._prefixes, l0s.tolist(), fvus.tolist(), strict=True)
        ]
        cosine, l0, l1 = (self._sums / self.rows).tolist()
        fvu = self._all.fvu
        return {
            "rows": self.rows,
            "mse": float(self._all.sums[1]) / self.rows / len(self._all.mean),
            "fvu": fvu,
            "metric_fvu": self._scaled.fvu,
            "explained_variance": 1 - fvu,
            "cosine": cosine,
            "l0": l0,
            "l1": l1,
            "silent_fraction": 1 - float(self._fired.double().mean()),
            **({} if self._massive is None else self._by_norm()),
            **({"prefixes": nested} if nested else {}),
        }

    def _by_norm(self) -> dict[str, Any]:
        whole, ordinary = self._all, self._ordinary
        shift = (ordinary.mean - whole.mean).square().sum()
        of_ordinary = float((ordinary.sums[0] + ordinary.rows * shift) / whole.sums[0])
        massive_rows = self.rows - int(ordinary.rows)
        return {
            "massive_rows": massive_rows,
            "massive_variance": max(0.0, 1 - of_ordinary) if massive_rows else 0.0,
            "ordinary_fvu": ordinary.fvu,
        }


def reconstruction(
    sae: Dictionary,
    batches: Iterable[Tensor],
    watch: Watch | None = None,
    massive: Massive | None = None,
) -> dict[str, Any]:
    """`Reconstruction.result` over batches of rows, (B, D), a transcoder's with targets, (B, D + E)."""
    return reconstructions([sae], batches, watch=watch, massive=massive)[0]


@torch.no_grad()
def reconstructions(
    saes: Sequence[Dictionary],
    batches: Iterable[Tensor],
    communicator: Communicator = ALONE,
    watch: Watch | None = None,
    massive: Massive | None = None,
) -> list[dict[str, Any]]:
    """`reconstruction` of several SAEs in one pass, over all processes."""
    measures = []
    for sae in saes:
        scale = sae.normalisation.target_scale
        sizes = sae.d_out, sae.d_sae, sae.prefixes
        measures.append(Reconstruction(*sizes, massive, scale.device, scale))
    for batch in batches:
        for sae, measure in zip(saes, measures, strict=True):
            rows = Batch.of(moved(batch, sae.W_enc.device).to(sae.W_enc.dtype), sae.d_in)
            z = sae.codes(rows.x)
            by_prefix = sae.predicted(rows.x, z)
            measure.update(rows.y, by_prefix[:, -1], z, by_prefix)
            if watch is not None:
                watch(z)
    for measure in measures:
        measure.all_reduce(communicator)
    return [measure.result() for measure in measures]


def doubts(measures: Mapping[str, Any], d_in: int, d_sae: int) -> dict[str, str]:
    """A warning for each doubtful measure of `Reconstruction.result`: `massive`, `fvu`, `l0`."""
    warnings, fvu, l0 = {}, measures["fvu"], measures["l0"]
    if measures.get("massive_variance", 0) > MASSIVE_VARIANCE:
        rows = measures["massive_rows"]
        holds = "holds" if rows == 1 else "hold"
        warnings["massive"] = (
            f"{counted(rows, 'row')} of massive norm {holds} {measures['massive_variance']:.1%} of the "
            f"variance, and FVU is {fvu:.4g}, but {measures['ordinary_fvu']:.4g} on the others"
        )
    if math.isfinite(fvu) and fvu > 1:
        warnings["fvu"] = (
            f"FVU {fvu:.4g} is above 1, so the mean of the rows would reconstruct them better"
        )
    name, limit = ("d_in", d_in) if 2 * d_in <= d_sae else ("half of d_sae", d_sae / 2)
    if l0 > limit:
        warnings["l0"] = f"L0 {l0:.4g} is above {name}, {limit:g}, so codes are not sparse"
    return warnings


class Firing:
    """How often each latent fires, and how many per row; the codes of the first `keep` rows."""

    def __init__(self, d_sae: int, keep: int = 0, device: torch.device = CPU) -> None:
        self.rows = 0
        self._counts = torch.zeros(d_sae, dtype=torch.int64, device=device)
        self._histogram = torch.zeros(d_sae + 1, dtype=torch.int64, device=device)
        self._keep = keep
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def update(self, z: Codes) -> None:
        if self.rows < self._keep:
            self._kept.append(z.dense()[: self._keep - self.rows].cpu())
        l0 = z.row_counts()
        self._counts += z.latent_counts()
        self._histogram.index_add_(0, l0, torch.ones_like(l0))
        self.rows += len(l0)

    @property
    def l0_histogram(self) -> Tensor:
        """Rows on which 0, 1, ..., F latents fire, (F + 1,), int64, on the CPU."""
        return self._histogram.cpu()

    @property
    def frequency(self) -> Tensor:
        """Fraction of rows on which each latent fires, (F,), float64, on the CPU."""
        return self._counts.cpu().double() / max(self.rows, 1)

    @property
    def patterns(self) -> Tensor:
        return torch.cat(self._kept) if self._kept else torch.zeros(0, len(self._counts))

    def result(self) -> dict[str, Any]:
        """The measures over all rows so far; ConfigError if there are none.

        `l0` and `l0_std` are mean and standard deviation over these rows; `density` is `l0 / d_sae`; `silent` counts
        latents that fire on no row, `dense` on more than a tenth.
        """
        _demand_rows(self.rows)
        fractions = self.l0_histogram.double() / self.rows  # (F + 1,)
        value = torch.arange(len(fractions), dtype=torch.float64)
        l0 = fractions @ value
        frequency = self.frequency
        return {
            "rows": self.rows,
            "l0": float(l0),
            "l0_std": float((fractions @ (value - l0).square()).sqrt()),
            "density": float(l0) / len(frequency),
            "silent": int((frequency == 0).sum()),
            "dense": int((frequency > DENSE_FREQUENCY).sum()),
            "frequency": frequency.tolist(),
        }


@torch.no_grad()
def firing(sae: Dictionary, batches: Iterable[Tensor], keep: int = 0) -> Firing:
    firings = Firing(sae.d_sae, keep, sae.W_enc.device)
    for x in batches:
        firings.update(sae.codes(x))
    return firings


def _demand_rows(rows: int) -> None:
    if not rows:
        raise ConfigError("nothing was measured: expected at least one row, got none")

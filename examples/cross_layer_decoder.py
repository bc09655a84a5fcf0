"""The decoder of a cross-layer transcoder in closed form, given the codes of all layers.

The output of MLP l is predicted from the codes z_i of layers i <= l, by `sum_i z_i W[i->l] + b_l`. With codes and
targets about their means, every target l has its own ridge regression on the codes up to it:

    sum over rows ||sum_{i<=l} z_i W[i->l] - y_l||^2 + alpha sum_{i<=l} s_i g^(l-i) ||W[i->l]||_F^2

with s_i the mean diagonal of layer i's Gram matrix, so that alpha does not depend on the codes' scale, and g >= 1 the
growth of the ridge with distance. The Gram matrix of target l is a leading block of that of all codes. With g = 1 so
is its ridge, and its Cholesky factor is a leading block of one factor, which solves for all targets; their leverages
are running sums of the squares of one solution. With g > 1 each target has its own factor. g = inf leaves W[l->l]
alone, the closed form of separate transcoders.

Alpha is the power of 3 with the least leave-one-out error of sampled rows, `mean ||r||^2 / (1 - h)^2` with residuals r
and leverages h, over each target's variance, averaged over targets.

B rows in a block, n sampled; L layers, F latents in a layer, M in all, E = d_out. All float64.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from saecli.base.devices import free_memory
from saecli.base.errors import ConfigError, MachineError, TrainingError
from saecli.sae.codes import Codes

STEP, FIRST = 3.0, -5  # alphas are powers of 3; the first power tried
POWERS = range(-20, 9)
SAMPLED = 1024


@dataclass(frozen=True)
class Decoders:
    weights: list[dict[int, Tensor]]  # of each target, by source, (F, E)
    biases: list[Tensor]  # (E,)
    alpha: float | None = None
    seconds: float = 0.0  # of processors, for the solution without the sums

    def predict(self, target: int, codes: Sequence[Codes] | Mapping[int, Codes]) -> Tensor:
        """y_hat of one layer, (B, E), from the codes of layers up to it."""
        y_hat = self.biases[target]
        for source, W_dec in self.weights[target].items():
            y_hat = codes[source].times(W_dec) + y_hat
        return y_hat


class Moments:
    """Of all rows `sum z`, `sum z z'`, (M, M), and `sum z_i y_l'` for i <= l; and some rows themselves.

    Memory: 8 M^2 bytes, and 4 M L E; solving takes twice as much again.
    """

    def __init__(self, sizes: Sequence[int], y_mean: Tensor, y_scatter: Tensor, rows: int) -> None:
        """`sizes`: latents of each layer. Mean and scatter of the targets, (L, E) each."""
        self.bounds = [*accumulate(sizes, initial=0)]
        self.rows, self.y_mean = rows, y_mean.double()
        self.variances = y_scatter.double().sum(1) / rows  # (L,)
        self.layers, self.d_out = y_mean.shape
        latents, device = self.bounds[-1], y_mean.device
        needed, free = 24 * latents**2 + 8 * latents * y_mean.numel(), free_memory(device)
        if needed > free:
            raise MachineError(
                f"the decoder of {latents:,} latents needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB "
                "are free; name fewer runs, or use a machine with more"
            )
        self._sum = torch.zeros(latents, dtype=torch.float64, device=device)
        self._gram = self._sum.new_zeros(latents, latents)  # on and below the diagonal
        self._cross = [  # of each source, its later targets side by side
            self._sum.new_zeros(size, (self.layers - source) * self.d_out)
            for source, size in enumerate(sizes)
        ]
        self._stride, self._seen = math.ceil(rows / SAMPLED), 0
        self._z: list[Tensor] = []
        self._y: list[Tensor] = []

    def add(self, codes: Sequence[Codes], y: Tensor) -> None:
        """A block of rows: codes of each layer, (B, F), and targets, (B, L, E)."""
        joint = Codes(torch.cat([own.dense() for own in codes], 1)).compact()
        about_mean = (y - self.y_mean).flatten(1)
        self._sum += joint.sums()
        joint.add_gram(self._gram)
        for source, own in enumerate(codes):
            later = about_mean[:, source * self.d_out :].to(y.dtype).contiguous()
            self._cross[source] += own.transposed_times(later)
        sampled = torch.arange(-self._seen % self._stride, len(y), self._stride, device=y.device)
        self._seen += len(y)
        self._z.append(joint.dense_rows(sampled).double())
        self._y.append(about_mean[sampled])

    @property
    def z_mean(self) -> Tensor:
        return self._sum / self.rows

    def samples(self) -> tuple[Tensor, Tensor]:
        """Codes, (n, M), and targets, (n, L, E), of some rows, about the means of all."""
        return torch.cat(self._z) - self.z_mean, torch.cat(self._y).unflatten(1, (-1, self.d_out))

    def cross(self, first: int, target: int) -> Tensor:
        """`sum z y'` of sources from `first` on, (m, E)."""
        parts = []
        for source in range(first, target + 1):
            begin = (target - source) * self.d_out
            parts.append(self._cross[source][:, begin : begin + self.d_out])
        return torch.cat(parts)

    def factor(self, first: int, last: int, alpha: float, growth: float) -> Tensor:
        """The Cholesky factor of the system of target `last`, of sources from `first` on, (m, m), lower."""
        begin, end = self.bounds[first], self.bounds[last + 1]
        mean = self.z_mean[begin:end]
        system = self._gram[begin:end, begin:end].clone()
        system.addr_(mean, mean, alpha=-self.rows)
        diagonal = system.diagonal()
        for source, (start, stop) in enumerate(pairwise(self.bounds[first : last + 2]), first):
            own = diagonal[start - begin : stop - begin]
            scale = max(own.mean().item(), 0.0) or 1.0  # 1 if no latent varies
            own += alpha * scale * (growth ** (last - source) if last > source else 1.0)
        info = torch.empty((), dtype=torch.int32, device=system.device)
        torch.linalg.cholesky_ex(system.mT, upper=True, out=(system.mT, info))  # in place
        if info.item() or not diagonal.isfinite().all():
            raise TrainingError(
                "the decoder cannot be solved: expected codes with finite products and a positive definite Gram "
                "matrix, got others; look at the runs and their rows for huge numbers"
            )
        return system


def _factors(
    moments: Moments, alpha: float, growth: float
) -> Iterator[tuple[int, Sequence[int], Tensor]]:
    """Factors with the first of their sources, and the targets that they are for."""
    layers = range(moments.layers)
    if growth == 1:
        yield 0, layers, moments.factor(0, layers[-1], alpha, growth)
        return
    for target in layers:
        first = target if math.isinf(growth) else 0
        yield first, [target], moments.factor(first, target, alpha, growth)


def _solved(factor: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """By substitution with the leading block for a right side, (m, C)."""
    block = factor[: len(right), : len(right)]
    return torch.linalg.solve_triangular(block.mT if transposed else block, right, upper=transposed)


def left_out(moments: Moments, alpha: float, growth: float) -> list[float]:
    """The leave-one-out error of each target over its variance."""
    z, y = moments.samples()
    errors = []
    for first, targets, factor in _factors(moments, alpha, growth):
        begin = moments.bounds[first]
        along = _solved(factor, z[:, begin : begin + len(factor)].T)
        for target in targets:
            half = _solved(factor, moments.cross(first, target))
            own = along[: len(half)]
            slack = 1 - 1 / moments.rows - own.square().sum(0)
            error = (y[:, target] - own.T @ half).square().sum(1) / slack.clamp(min=1e-9).square()
            errors.append((error.mean() / moments.variances[target]).item())
    return errors


def choose_alpha(moments: Moments, growth: float) -> float:
    """The power of 3 of which neither neighbour has a lower leave-one-out error."""
    known: dict[int, float] = {}

    def error(power: int) -> float:
        if power not in known:
            tried = power in POWERS
            known[power] = (
                float(np.mean(left_out(moments, STEP**power, growth))) if tried else math.inf
            )
        return known[power]

    best, stride = FIRST, 2
    while stride:
        neighbour = min(best - stride, best + stride, key=error)
        if error(neighbour) < error(best):
            best = neighbour
        else:
            stride //= 2
    return STEP**best


def solve(
    moments: Moments,
    growth: float = 1.0,
    alpha: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Decoders:
    """The decoders of all layers; alpha by leave-one-out unless given.

    Cost: with g = 1 a factor, M^3 / 3 operations, and two substitutions, M^2 L E / 3 each; with g > 1 factors of
    L M^3 / 12 operations. For each alpha tried a factor and one substitution.
    """
    if not growth >= 1:
        raise ConfigError(
            f"the ridge must not fall with distance: expected a growth of at least 1, got {growth:g}"
        )
    began = time.process_time()
    alpha = choose_alpha(moments, growth) if alpha is None else alpha
    weights, biases = [], []
    for first, targets, factor in _factors(moments, alpha, growth):
        begin = moments.bounds[first]
        for target in targets:
            half = _solved(factor, moments.cross(first, target))
            W_dec = _solved(factor, half, transposed=True)
            z_mean = moments.z_mean[begin : begin + len(W_dec)]
            biases.append((moments.y_mean[target] - z_mean @ W_dec).to(dtype))
            W_dec = W_dec.to(dtype).contiguous()  # LAPACK's are column-major
            bounds = pairwise(moments.bounds[first : target + 2])
            parts = [W_dec[start - begin : stop - begin] for start, stop in bounds]
            weights.append(dict(enumerate(parts, first)))
    return Decoders(weights, biases, alpha, time.process_time() - began)

"""The decoder of a cross-layer transcoder in closed form, given the codes of all layers.

The output of MLP l is predicted from the codes z_i of layers i <= l, by `sum_i z_i W[i->l] + b_l`. With centred codes
and targets, every target l has its own ridge regression on the codes that precede it:

    minimise  sum over rows ||sum_{i<=l} z_i W[i->l] - y_l||^2 + sum_{i<=l} alpha s_i g^(l-i) ||W[i->l]||_F^2

with s_i the mean variance of layer i's codes times rows, so that alpha does not depend on their scale, and g >= 1 a
growth of the ridge with distance. The Gram matrix of target l is a leading block of that of all codes. With g = 1 its
ridge is one too, so its Cholesky factor is the leading block of one factor, which solves all targets; the leverages of
all targets are running sums of the squares of one solution. With g > 1 each target has a factor of its own; g = inf
leaves W[l->l] alone, the closed form of separate transcoders.

Alpha has the least leave-one-out error, `mean ||r||^2 / (1 - h)^2` over sampled rows, h their leverages, over each
target's variance and averaged over targets; it is a power of 3.

N rows, n sampled; L layers, F latents in a layer, M in all, D = d_out, T targets of a factor. All float64.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from saecli.base.devices import free_memory
from saecli.base.errors import ConfigError, MachineError, TrainingError
from saecli.sae.codes import Codes

STEP, FIRST = 3.0, -5  # alphas are powers of 3, from this one
LOWEST, HIGHEST = -16, 7  # powers
SAMPLED = 1024  # rows of the leave-one-out error


@dataclass(frozen=True)
class Decoders:
    """Of each target the decoder of each source, (F, D), and a bias, (D,)."""

    weights: list[dict[int, Tensor]]
    biases: list[Tensor]
    alpha: float | None = None
    seconds: float = 0.0  # of processors, for the solution without the sums

    def predict(self, target: int, codes: Sequence[Codes] | dict[int, Codes]) -> Tensor:
        """y_hat of one layer, (B, D), from the codes of layers up to it."""
        y_hat = self.biases[target]
        for source, W_dec in self.weights[target].items():
            y_hat = codes[source].times(W_dec) + y_hat
        return y_hat


class Moments:
    """Sums over rows that all decoders need: of z z', (M, M), of z (y_l - mean)' for all later targets, and samples.

    Cost: 8 M^2 bytes, and half of 8 M L D.
    """

    def __init__(self, sizes: Sequence[int], y_mean: Tensor, y_scatter: Tensor, rows: int) -> None:
        """`sizes`: latents of each layer; mean and scatter of the targets of all layers, (L, D) each, over N rows."""
        self.bounds = [*accumulate(sizes, initial=0)]
        self.layers, self.d_out = y_mean.shape
        self.rows, self.y_mean = rows, y_mean.double()
        self.variances = y_scatter.double().sum(1) / rows  # (L,)
        latents, device = self.bounds[-1], y_mean.device
        numbers = latents**2 + self.d_out * sum(
            size * (self.layers - source) for source, size in enumerate(sizes)
        )
        needed, free = (
            2 * 8 * numbers,
            free_memory(device),
        )  # a factor and solutions take as much again
        if needed > free:
            raise MachineError(
                f"the decoder of {latents:,} latents needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB "
                "are free; name runs of fewer layers or latents, or use a machine with more"
            )
        zeros = torch.zeros(latents, dtype=torch.float64, device=device)
        self._sum, self._gram = (
            zeros,
            zeros.new_zeros(latents, latents),
        )  # on and below the diagonal
        self._cross = [
            zeros.new_zeros(size, (self.layers - source) * self.d_out)
            for source, size in enumerate(sizes)
        ]
        self._stride, self._seen = math.ceil(rows / SAMPLED), 0
        self._z: list[Tensor] = []
        self._y: list[Tensor] = []

    def add(self, codes: Sequence[Codes], y: Tensor) -> None:
        """A block of rows: codes of each layer, (B, F), and targets, (B, L, D)."""
        joint = Codes(torch.cat([own.dense() for own in codes], 1)).compact()
        centred = (y.double() - self.y_mean).flatten(1)
        joint.add_gram(self._gram)
        self._sum += joint.sums()
        right = centred.to(y.dtype)
        for source, own in enumerate(codes):
            later = right[:, source * self.d_out :].contiguous()
            self._cross[source] += own.transposed_times(later)
        sampled = torch.arange(-self._seen % self._stride, len(y), self._stride)
        self._seen += len(y)
        if len(sampled):
            sampled = sampled.to(y.device)
            self._z.append(joint.dense_rows(sampled).double())
            self._y.append(centred[sampled])

    @property
    def mean(self) -> Tensor:
        """Of the codes, (M,)."""
        return self._sum / self.rows

    @property
    def scales(self) -> list[float]:
        """The mean of the Gram matrix' diagonal for each source, 1 if none of its latents varies."""
        diagonal = self._gram.diagonal() - self.rows * self.mean.square()
        return [
            max(diagonal[begin:end].mean().item(), 0.0) or 1.0
            for begin, end in pairwise(self.bounds)
        ]

    def samples(self) -> tuple[Tensor, Tensor]:
        """Centred codes, (n, M), and targets, (n, L D), of some rows."""
        return torch.cat(self._z) - self.mean, torch.cat(self._y)

    def system(self, first: int, target: int, ridge: Sequence[float]) -> Tensor:
        """The centred Gram matrix of sources `first` to `target`, plus each source's ridge; lower triangle."""
        begin, end = self.bounds[first], self.bounds[target + 1]
        mean = self.mean[begin:end]
        system = self._gram[begin:end, begin:end].clone()
        system.addr_(mean, mean, alpha=-self.rows)
        for source, own in zip(range(first, target + 1), ridge, strict=True):
            block = slice(self.bounds[source] - begin, self.bounds[source + 1] - begin)
            system.diagonal()[block] += own
        return system

    def cross(self, source: int, targets: range) -> Tensor:
        """`sum z y'` of a source and the targets after it, side by side, a copy, (F, T D)."""
        begin, end = (max(target, source) - source for target in (targets.start, targets.stop))
        return self._cross[source][:, begin * self.d_out : end * self.d_out].clone()


class Factor:
    """Targets that share a Cholesky factor, solved by substitution, layer by layer, in place.

    Right sides and solutions are lists over sources: (F, T D), of the targets that come after each.
    """

    def __init__(
        self, moments: Moments, first: int, targets: range, alpha: float, growth: float
    ) -> None:
        self.sources, self.targets, self.moments = range(first, targets.stop), targets, moments
        scales, last = moments.scales, targets[-1]
        ridge = [alpha * scales[source] * _grown(growth, last - source) for source in self.sources]
        matrix = moments.system(first, last, ridge)
        info = torch.empty((), dtype=torch.int32, device=matrix.device)
        torch.linalg.cholesky_ex(matrix.mT, upper=True, out=(matrix.mT, info))
        if info.item() or not matrix.diagonal().isfinite().all():
            raise TrainingError(
                "the decoder cannot be solved: expected a positive definite Gram matrix of finite codes, got another; "
                "look at the runs and their rows for huge numbers"
            )
        self._matrix = matrix  # below the diagonal

    def _block(self, row: int, column: int) -> Tensor:
        bounds, begin = self.moments.bounds, self.moments.bounds[self.sources.start]
        rows, columns = (slice(bounds[at] - begin, bounds[at + 1] - begin) for at in (row, column))
        return self._matrix[rows, columns]

    def columns(self, source: int, target: int) -> slice:
        """Those of a target, and of all later ones without a stop, in a source's right side."""
        before = max(target, self.targets.start) - max(source, self.targets.start)
        return slice(before * self.moments.d_out, (before + 1) * self.moments.d_out)

    def _later(self, right: Tensor, source: int, target: int) -> Tensor:
        return right[:, self.columns(source, target).start :]

    def forward(self) -> list[Tensor]:
        """The solution of half of the system, for all targets at once."""
        right = [self.moments.cross(source, self.targets) for source in self.sources]
        first = self.sources.start
        for source in self.sources:
            own = torch.linalg.solve_triangular(
                self._block(source, source), right[source - first], upper=False
            )
            right[source - first] = own
            for other in range(source + 1, self.sources.stop):
                below = self._block(other, source)
                right[other - first].addmm_(below, self._later(own, source, other), alpha=-1)
        return right

    def backward(self, half: list[Tensor]) -> list[Tensor]:
        """The decoders."""
        first = self.sources.start
        for source in reversed(self.sources):
            own = torch.linalg.solve_triangular(
                self._block(source, source).mT, half[source - first], upper=True
            )
            half[source - first] = own
            for other in range(first, source):
                left = self._later(half[other - first], other, source)
                left.addmm_(self._block(source, other).mT, own, alpha=-1)
        return half

    def left_out(self) -> list[float]:
        """The leave-one-out error of each target over its variance."""
        moments, half = self.moments, self.forward()
        z, y = moments.samples()
        begin, end = moments.bounds[self.sources.start], moments.bounds[self.sources.stop]
        v = torch.linalg.solve_triangular(self._matrix, z[:, begin:end].T, upper=False)
        parts = v.split([len(part) for part in half])
        leverage, D = torch.full_like(y[:, 0], 1 / moments.rows), moments.d_out
        errors = [y[:, target * D : (target + 1) * D].clone() for target in self.targets]
        measured = []
        for source, own, right in zip(self.sources, parts, half, strict=True):
            leverage += own.square().sum(0)
            for target, error in zip(self.targets, errors, strict=True):
                if target >= source:
                    error.addmm_(own.T, right[:, self.columns(source, target)], alpha=-1)
            if source in self.targets:  # with all the codes before it
                error = errors[source - self.targets.start].square().sum(1)
                error = (error / (1 - leverage).clamp(min=1e-9).square()).mean()
                measured.append((error / moments.variances[source]).item())
        return measured


def _grown(growth: float, distance: int) -> float:
    return growth**distance if distance else 1.0


def _factors(moments: Moments, alpha: float, growth: float) -> Iterator[Factor]:
    """One for all targets, or one for each."""
    layers = range(moments.layers)
    if growth == 1:
        yield Factor(moments, 0, layers, alpha, growth)
        return
    for target in layers:
        first = target if math.isinf(growth) else 0
        yield Factor(moments, first, range(target, target + 1), alpha, growth)


def choose_alpha(moments: Moments, growth: float) -> float:
    """The power of 3 from which neither neighbour has a lower leave-one-out error."""
    errors: dict[int, float] = {}

    def error(power: int) -> float:
        if not LOWEST <= power <= HIGHEST:
            return math.inf
        if power not in errors:
            each = [
                own
                for factor in _factors(moments, STEP**power, growth)
                for own in factor.left_out()
            ]
            errors[power] = float(np.mean(each))
        return errors[power]

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

    Cost: with g = 1 a Cholesky factor, M^3 / 3 operations, and two substitutions, F^2 D L^3 / 3 each, for every alpha
    but the last one of these; with g > 1 factors of L M^3 / 12 operations in all.
    """
    if not growth >= 1:
        raise ConfigError(
            f"the ridge must not fall with distance: expected a growth of at least 1, got {growth:g}"
        )
    began = time.process_time()
    if alpha is None:
        alpha = choose_alpha(moments, growth)
    weights: list[dict[int, Tensor]] = [{} for _ in range(moments.layers)]
    for factor in _factors(moments, alpha, growth):
        decoders = factor.backward(factor.forward())
        for source, decoder in zip(factor.sources, decoders, strict=True):
            for target in factor.targets:
                if target >= source:
                    own = decoder[:, factor.columns(source, target)]
                    weights[target][source] = own.to(dtype).contiguous()
    means = [moments.mean[begin:end] for begin, end in pairwise(moments.bounds)]
    biases = []
    for target, own in enumerate(weights):
        bias = moments.y_mean[target].clone()
        for source, decoder in own.items():
            bias -= means[source] @ decoder.double()
        biases.append(bias.to(dtype))
    return Decoders(weights, biases, alpha, time.process_time() - began)


def collect(moments: Moments, blocks: Iterable[tuple[Sequence[Codes], Tensor]]) -> Moments:
    for codes, y in blocks:
        moments.add(codes, y)
    return moments

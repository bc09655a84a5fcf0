"""Normalised and smoothed training rows in batches; rows of arrays.

N rows, n sampled, B in a batch, D = d_in, E the width of targets next to the rows, 0 if these are the rows.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing
import torch
from torch import Tensor

from ..base.devices import batches_on, moved
from ..base.errors import ConfigError
from ..base.processes import ALONE, Communicator
from ..sae.dictionary import SAE, Batch, Normalisation
from ..store.reader import RowSource
from ..store.split import WHOLE, Part, Stream
from ..store.values import Spread

ArrayLike = Tensor | numpy.typing.ArrayLike
# Read at a time where the order does not matter; and sampled to choose alpha, or to set thresholds on rows kept out.
BLOCK_ROWS = 4096
# Rows per unknown of a row's least squares, latents or dimensions. Decoder steps that used all 117 on tiny-gemma2 were
# no better: FVU 0.1346 instead of 0.1333.
PASS_ROWS = 32
# A sample for the initial scale, smoothing and revival, and for thresholds if no rows are kept out.
SAMPLED_ROWS = 2048


def fit_normalisation(
    kind: str,
    spread: Spread,
    dtype: torch.dtype,
    widths: Sequence[int] = (),
    d_target: int = 0,
    reads: np.ndarray | None = None,
) -> Normalisation:
    """The normalisation of rows and targets of this spread; `widths` are of inputs side by side.

    `scale` centres, and divides each input, and the target, by one number, to a mean squared norm of its width. `model`
    and `init` first multiply each dimension by the root of `reads`, (D + E,): how strongly the model reads it, or an
    SAE's metric. `standardize` centres, and gives each dimension that varies unit variance, as the paper does.
    ConfigError if all rows are the same.
    """
    mean, variance = torch.from_numpy(spread.mean), torch.from_numpy(spread.variance)
    d_in = len(mean) - d_target
    sizes = [*(widths or [d_in]), *([d_target] if d_target else [])]
    roots = torch.ones_like(variance)
    if kind in ("model", "init"):
        roots = torch.from_numpy(reads).sqrt()[: len(mean)]
    parts = zip((variance * roots.square()).split(sizes), roots.split(sizes), strict=True)
    scale = torch.cat([_scale(kind, part, spread.rows) / part_roots for part, part_roots in parts])
    if kind == "none":
        mean = torch.zeros_like(mean)
    normalised = variance / scale.square()
    total = normalised[d_in:].sum() if d_target else normalised.sum()
    return Normalisation(mean.to(dtype), scale.to(dtype), total.to(dtype), d_in)


def _scale(kind: str, variance: Tensor, rows: int) -> Tensor:
    if variance.sum() == 0:
        raise ConfigError(
            f"there is nothing to learn: expected training rows that differ, got {rows}, all the same; give another "
            "--data, or a larger --fraction"
        )
    if kind == "none":
        return torch.ones_like(variance)
    if kind in ("scale", "model", "init"):
        return variance.mean().sqrt().expand_as(variance)
    return torch.where(variance > 0, variance.sqrt(), 1.0)


def on_raw_rows(sae: SAE, normalisation: Normalisation) -> SAE:
    """The SAE with the normalisation folded in, in float64, and kept as its metric."""
    folded = sae.copy_to(torch.float64).on_raw_rows(normalisation)
    _, scale, _, target_scale = normalisation.of_sae()
    # In units of the largest, so that one scale for all dimensions is exactly 1.
    own = torch.cat([scale, target_scale]) / target_scale.max()
    folded.scale = own if normalisation.kept is None else normalisation.kept
    return folded.copy_to(sae.W_enc.dtype)


class ArrayRows(RowSource):
    """Rows, (N, D), and targets, (N, E), of floats, or bytes of images; float32 ones are not copied."""

    name = "these rows"

    def __init__(self, rows: ArrayLike, targets: ArrayLike | None = None) -> None:
        self._targets = None if targets is None else ArrayRows(targets)
        if isinstance(rows, Tensor):
            rows = rows.detach().cpu()
            if rows.is_floating_point() and rows.itemsize < 4:  # NumPy has no bfloat16
                rows = rows.float()
        rows = np.asarray(rows)
        if rows.ndim != 2 or not rows.size:
            raise ConfigError(
                f"--rows must be an array of numbers (rows, d_in), got one of {rows.dtype} and shape {rows.shape}"
            )
        if not (rows.dtype.kind == "f" or rows.dtype == "uint8"):
            # Other integers are token ids, or the bits of bfloat16 numbers.
            raise ConfigError(
                f"--rows must be floats, or bytes of images, got {rows.dtype}; convert numbers by astype(float32), and "
                "bits of bfloat16 by torch's view(torch.bfloat16)"
            )
        if self._targets is not None and self._targets.rows != len(rows):
            raise ConfigError(
                f"--target must have {len(rows)} rows, as --rows has, got {self._targets.rows}"
            )
        self._rows, (self.rows, self.d_in) = rows, rows.shape
        self.d_target = self._targets.d_in if self._targets else 0
        # Narrower dtypes are widened; float64 is kept for training in float64.
        self._dtype = np.float64 if rows.dtype == np.float64 else np.float32
        bad = sum((~np.isfinite(block).all(1)).sum() for block in self.sequential(BLOCK_ROWS))
        if bad:
            raise ConfigError(
                f"--rows must be finite, got {bad} of {len(rows)} with a NaN or infinity; leave those out"
            )

    def batches(
        self, batch_size: int, *, seed: int, epoch: int, part: Part = WHOLE, first: int = 0
    ) -> Stream:
        """Batches, (B, D + E), shuffled uniformly; a pure function of seed and epoch."""
        order = np.random.default_rng((seed, epoch)).permutation(self.rows)
        for begin in range(first * batch_size, self.rows, batch_size):
            numbers = order[begin : begin + batch_size]
            own, stop = part.of(len(numbers))
            if stop > own:
                yield self._with_targets(numbers[own:stop])

    def sequential(self, batch_size: int, part: Part = WHOLE) -> Stream:
        first, stop = part.of(math.ceil(self.rows / batch_size))
        for block in range(first, stop):
            yield self._with_targets(slice(block * batch_size, (block + 1) * batch_size))

    def _with_targets(self, chosen: np.ndarray | slice) -> np.ndarray:
        rows = self._rows[chosen].astype(self._dtype)
        if self._targets is None:
            return rows
        return np.concatenate([rows, self._targets._with_targets(chosen)], axis=1)


@dataclass(frozen=True)
class TrainingRows:
    """Normalised rows in batches, on the normalisation's device; each process takes a part of each batch."""

    stored: RowSource
    normalisation: Normalisation
    batch_size: int
    seed: int  # of their order
    communicator: Communicator = ALONE

    @property
    def rows(self) -> int:
        return self.stored.rows

    @property
    def d_in(self) -> int:
        return self.stored.d_in

    def in_epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        """Every row once, without the `first` batches, in an order that is a pure function of seed and epoch."""
        part, size = part_of(self.communicator), self.batch_size
        own = self.stored.batches(size, seed=self.seed, epoch=epoch, part=part, first=first)
        yield from self._in_all(own, size, lambda number, size: torch.arange(*part.of(size)), first)

    def from_step(self, step: int, batches: int, epochs: int) -> Generator[Batch, None, None]:
        """Shuffled batches from a step on; each of the `epochs` has a number of `batches`."""
        begun, first = divmod(step, batches)
        for epoch in range(begun, epochs):
            yield from self.in_epoch(epoch, first if epoch == begun else 0)

    def some(self, count: int, number: int) -> Iterator[Batch]:
        """`count` rows once, in larger batches: all in stored order, or the first of shuffled order `number`."""
        if count == self.rows:
            yield from self._sequential()
            return
        left, pending = count, []
        with closing(self.in_epoch(number)) as batches:
            for batch in batches:
                if not left:
                    return
                pending.append(batch.first(left))
                left -= pending[-1].size
                if not left or sum(batch.size for batch in pending) >= BLOCK_ROWS:
                    yield Batch.joined(pending)
                    pending = []
        if pending:
            yield Batch.joined(pending)

    @cached_property
    def sample(self) -> Batch:
        """The first `SAMPLED_ROWS` in shuffled order; the same in all processes."""
        return self.sample_of(self.stored, SAMPLED_ROWS)

    def sample_of(self, stored: RowSource, count: int) -> Batch:
        """The first rows in shuffled order."""
        with closing(stored.batches(self.batch_size, seed=self.seed, epoch=0)) as batches:
            enough = islice(batches, math.ceil(count / self.batch_size))
            rows = torch.cat([*self._normalised(enough)])
        return Batch.of(rows[:count], self.d_in)

    @cached_property
    def regression(self) -> Tensor | None:
        """The targets' regression on at most 32 rows per dimension, (D, E); None if they are the rows."""
        if not self.stored.d_target:
            return None
        D, mean = self.d_in, self.normalisation.mean
        count = min(self.rows, PASS_ROWS * D)
        products = torch.zeros(D, D + self.stored.d_target, dtype=torch.float64, device=mean.device)
        for batch in self.some(count, 0):
            x, y = batch.x.double(), batch.y.double()
            products += x.T @ torch.cat([x, y], 1)
        xx, xy = self.communicator.all_reduce(products).tensor_split([D], 1)
        # The ridge keeps the solution from fitting few rows exactly, and vanishes where rows are many.
        ridge = xx.diagonal().mean() * (D / count) ** 4
        return torch.linalg.solve(xx + ridge * torch.eye(D).to(xx), xy).to(mean.dtype)

    def _sequential(self) -> Iterator[Batch]:
        """Each batch is in one process, and empty in the others."""
        part = part_of(self.communicator)
        first, stop = part.of(math.ceil(self.rows / BLOCK_ROWS))
        return self._in_all(
            self.stored.sequential(BLOCK_ROWS, part),
            BLOCK_ROWS,
            lambda number, size: None if first <= number < stop else torch.arange(0),
        )

    def _in_all(
        self,
        stored: Stream,
        batch_size: int,
        index: Callable[[int, int], Tensor | None],
        first: int = 0,
    ) -> Iterator[Batch]:
        """All processes' batches from `first` on, given this one's rows and, by number and size, `Batch.index`."""
        # Left to the garbage collector, which ignores exceptions, a stream would lose a Ctrl-C while its threads end.
        with closing(stored):
            own = self._normalised(stored)
            if self.communicator.world_size == 1:
                yield from (Batch.of(rows, self.d_in) for rows in own)
                return
            empty = self.normalisation.mean.new_empty(0, self.d_in + self.stored.d_target)
            for number, begin in enumerate(range(first * batch_size, self.rows, batch_size), first):
                size = min(batch_size, self.rows - begin)
                numbers = index(number, size)
                rows = next(own) if numbers is None or len(numbers) else empty
                yield Batch.of(rows, self.d_in, size, numbers)

    def _normalised(self, batches: Iterator[np.ndarray] | Iterator[Tensor]) -> Iterator[Tensor]:
        mean = self.normalisation.mean
        for batch in batches_on(batches, mean.device):
            yield self.normalisation(batch.to(mean.dtype))


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Moves rows along differences of other rows, so that the encoder overfits less.

        x_i + width ||x_i|| (x_j - x_k) / sqrt(||x_j||^2 + ||x_k||^2),    j and k drawn from a sample of all rows

    with norms about the sample's mean. Targets move by the same multiple of their own difference.

    Source: the smoothed bootstrap (Silverman and Young, 1987), with the kernel taken from pairs of rows.
    """

    width: float  # fraction of its norm by which a row is moved; 0 for none
    sample: Tensor  # (n, D); with n < 2 nothing moves
    targets: Tensor | None = None  # the sample's, (n, E); None if these are the rows

    @property
    def inflation(self) -> float:
        """Variance over the rows' own."""
        return 1 + self.width**2 if self.moves else 1.0

    @property
    def moves(self) -> bool:
        return self.width > 0 and len(self.sample) > 1

    @cached_property
    def _mean(self) -> Tensor:
        return self.sample.mean(0)

    @cached_property
    def _squares(self) -> Tensor:
        return (self.sample - self._mean).square().sum(1)

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A batch of moved rows, in new tensors; draws are on the CPU, for all processes' rows."""
        x = batch.x
        if not self.moves:
            return batch
        n = len(self.sample)
        first = torch.randint(n, (batch.size,), generator=generator)
        # Another row each.
        second = (first + 1 + torch.randint(n - 1, (batch.size,), generator=generator)) % n
        if batch.index is not None:
            first, second = first[batch.index], second[batch.index]
        first, second = moved(torch.stack([first, second]), x.device)
        both = (self._squares[first] + self._squares[second]).clamp(min=torch.finfo(x.dtype).tiny)
        relative = ((x - self._mean).square_().sum(1) / both).sqrt()
        step = (self.width * relative)[:, None]

        def moved_by(sample: Tensor, rows: Tensor) -> Tensor:
            # In place, and not by indexing, in half the time.
            difference = sample.index_select(0, first).sub_(sample.index_select(0, second))
            return difference.mul_(step).add_(rows)

        moved_x = moved_by(self.sample, x)
        if batch.y is x:
            return replace(batch, x=moved_x, y=moved_x)
        assert self.targets is not None
        return replace(batch, x=moved_x, y=moved_by(self.targets, batch.y))


def part_of(communicator: Communicator) -> Part:
    return Part(communicator.rank, communicator.world_size)


def raw_batches(stored: RowSource, communicator: Communicator = ALONE) -> Iterator[Tensor]:
    """This process' part of the rows, unnormalised, in batches, (B, D + E), float32; each is valid until the next."""
    return map(torch.from_numpy, stored.sequential(BLOCK_ROWS, part_of(communicator)))

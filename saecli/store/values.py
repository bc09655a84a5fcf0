"""Values of rows: stored types (float32, float16, bfloat16), true codes in CSR form, statistics.

Legend: R rows, D = d_in, n entries, G features.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import h5py
    from scipy.sparse import csr_array

PIECE_BYTES = 256 << 10  # converted at a time, in bytes of the source


@dataclass(frozen=True)
class StoredType:
    name: str
    storage: np.dtype  # of the bytes; bfloat16 is kept as its bits in a uint16
    limit: float  # largest float32 that stays finite in this type
    # (float32 array within the limit, storage array to fill); rounds to nearest even.
    encode: Callable[[np.ndarray, np.ndarray], None]
    decode: Callable[
        [np.ndarray, np.ndarray], None
    ]  # (finite storage array, float32 array to fill), contiguous

    @property
    def hdf5(self) -> "h5py.h5t.TypeID":
        """bfloat16 is a custom float that the HDF5 library itself converts to float32."""
        import h5py  # `sae list` need not wait for it

        if self.name != "bfloat16":
            return h5py.h5t.py_create(self.storage)
        bfloat16 = h5py.h5t.IEEE_F32LE.copy()
        bfloat16.set_fields(
            15, 7, 8, 0, 7
        )  # sign bit; exponent's position and size; mantissa's position and size
        bfloat16.set_size(2)
        bfloat16.set_ebias(127)
        return bfloat16

    def keeps(self, rows: np.ndarray) -> np.ndarray:
        """Whether each row, (R, D) float32 or already of this type, stays finite in it, (R,) bool."""
        if rows.dtype == np.uint16:
            return ((rows & 0x7F80) != 0x7F80).all(axis=1)
        if rows.dtype == np.float16:
            return np.isfinite(rows).all(axis=1)
        # A NaN makes the extremes NaN, and every comparison with NaN is false.
        return (rows.max(axis=1) <= self.limit) & (rows.min(axis=1) >= -self.limit)

    def encode_rows(self, source: np.ndarray) -> np.ndarray:
        """Rows, (R, D) float32, contiguous and within the limit, in this type."""
        out = np.empty(source.shape, self.storage)
        _in_pieces(self.encode, source, out)
        return out

    def decode_rows(self, source: np.ndarray, out: np.ndarray) -> None:
        """Decode rows, (R, D) of the storage dtype, into `out`, (R, D) float32, both contiguous."""
        _in_pieces(self.decode, source, out)


def _in_pieces(
    convert: Callable[[np.ndarray, np.ndarray], None], source: np.ndarray, out: np.ndarray
) -> None:
    """Convert piece by piece, so that the passes over each piece stay in a core's cache."""
    piece = max(1, PIECE_BYTES // max(1, source[:1].nbytes))
    for start in range(0, len(source), piece):
        convert(source[start : start + piece], out[start : start + piece])


def _encode_bfloat16(values: np.ndarray, out: np.ndarray) -> None:
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")


def _decode_bfloat16(source: np.ndarray, out: np.ndarray) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, source)
    np.left_shift(bits, 16, out=bits)


def _decode_float16(source: np.ndarray, out: np.ndarray) -> None:
    # Six times faster than astype: shift exponent and mantissa into position (widening to int32 extends the sign),
    # then correct the exponent's bias, 127 - 15, by a product, which is exact for subnormals too.
    bits = out.view(np.int32)
    np.copyto(bits, source.view(np.int16))
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, np.int32(-0x70002000), out=bits)
    np.multiply(out, np.float32(2.0**112), out=out)


def _convert(source: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, source, casting="same_kind")


DTYPES: dict[str, StoredType] = {
    "float32": StoredType(
        "float32", np.dtype("<f4"), float(np.finfo(np.float32).max), _convert, _convert
    ),
    # 65520 lies half-way between the largest float16, 65504, and 65536, which would be the next.
    "float16": StoredType(
        "float16",
        np.dtype("<f2"),
        float(np.nextafter(np.float32(65520), np.float32(0))),
        _convert,
        _decode_float16,
    ),
    "bfloat16": StoredType(
        "bfloat16",
        np.dtype("<u2"),
        float(np.uint32(0x7F7F7FFF).view(np.float32)),
        _encode_bfloat16,
        _decode_bfloat16,
    ),
}

CODES = "codes"  # the group of a shard that holds true codes, of the non-zeros in CSR form
OFFSET, INDEX, VALUE = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")


Column: TypeAlias = "np.ndarray | csr_array"  # (R,) integers, or true codes of R rows, (R, G)


def stacked(parts: Sequence[Column]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    from scipy.sparse import vstack  # `sae list` need not wait for it

    return vstack(parts, format="csr")


@dataclass(frozen=True)
class Norms:
    rows: int
    mean: float
    max: float

    @classmethod
    def of(cls, norms: np.ndarray) -> Self:
        """Summary of the finite norms, (R,) (at least one)."""
        finite = norms[np.isfinite(norms)]
        return cls(len(finite), float(finite.mean()), float(finite.max()))

    def __add__(self, other: "Norms") -> "Norms":
        rows = self.rows + other.rows
        return Norms(
            rows,
            self.mean + (other.mean - self.mean) * (other.rows / rows),
            max(self.max, other.max),
        )


@dataclass(frozen=True)
class Dropped:
    """Rows dropped, by reason: their number, and their norms if one is finite."""

    counts: Mapping[str, int] = field(default_factory=dict)
    norms: Mapping[str, Norms] = field(default_factory=dict)

    @classmethod
    def of(cls, norms: Mapping[str, np.ndarray]) -> Self:
        """Count rows by their norms, (R,) for each reason; NaN or infinity for a row without one."""
        return cls(
            {reason: len(values) for reason, values in norms.items() if len(values)},
            {
                reason: Norms.of(values)
                for reason, values in norms.items()
                if np.isfinite(values).any()
            },
        )

    def __add__(self, other: "Dropped") -> "Dropped":
        norms = dict(self.norms)
        for reason, more in other.norms.items():
            norms[reason] = norms[reason] + more if reason in norms else more
        return Dropped(Counter(self.counts) + Counter(other.counts), norms)


def row_norms(rows: np.ndarray) -> np.ndarray:
    """Euclidean norms, (R,) float64, of float rows, (R, D); NaN or infinite where the row is."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))


# Bin 0 is for norms of 0; bin i for norms in [2^((i - 1) / 40 - 149), 2^(i / 40 - 149)). The least float32 above 0 is
# 2^-149, and no norm in 2^42 dimensions reaches 2^149.
BINS_PER_DOUBLING, LEAST_EXPONENT = 40, -149
BINS = 1 + BINS_PER_DOUBLING * 2 * -LEAST_EXPONENT
QUANTILE_ERROR = 2 ** (0.5 / BINS_PER_DOUBLING) - 1  # relative, half a bin: 0.87%
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
OUTLYING = 10  # times the median norm: attention sinks have 40 to 150 times


@dataclass(frozen=True)
class Spread:
    """Mean and scatter, `sum_i (x_i - mean)^2`, of rows, per dimension: (D,) float64 each."""

    rows: int
    mean: np.ndarray
    scatter: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> Self:
        """Measure rows, (R, D) float64, R at least 1, overwriting them; two passes avoid cancellation."""
        mean = np.add.reduce(rows, axis=0) / len(rows)
        rows -= mean
        np.multiply(rows, rows, out=rows)
        return cls(len(rows), mean, np.add.reduce(rows, axis=0))

    @classmethod
    def measured(cls, batches: Iterable[np.ndarray], d_in: int) -> Self:
        """Measure batches, (R, D) each, in one pass."""
        total = cls(0, np.zeros(d_in), np.zeros(d_in))
        for batch in batches:
            total += cls.of(batch.astype(np.float64))
        return total

    @property
    def variance(self) -> np.ndarray:
        return self.scatter / self.rows

    def __add__(self, other: "Spread") -> Self:
        """The union of both sets of rows: with d the difference of their means,

            mean = mean_a + d n_b / n      scatter = scatter_a + scatter_b + d^2 n_a n_b / n

        Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
        variances".
        """
        rows, shift = self.rows + other.rows, other.mean - self.mean
        weight = other.rows / rows
        return type(self)(
            rows,
            self.mean + shift * weight,
            self.scatter + other.scatter + shift * shift * (self.rows * weight),
        )

    def __sub__(self, part: "Spread") -> Self:
        """The rows outside `part`; a scatter much smaller than the whole's keeps few digits."""
        return self + Spread(-part.rows, part.mean, -part.scatter)


@dataclass(frozen=True)
class Statistics:
    """Statistics of rows; `norm_counts`, (BINS,) int64, is a histogram of their norms."""

    spread: Spread
    norms: Norms
    norm_counts: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> Self:
        """Measure finite rows, (R, D) float64, R at least 1, overwriting them."""
        norms = row_norms(rows)
        with np.errstate(divide="ignore"):
            above = np.floor(BINS_PER_DOUBLING * (np.log2(norms) - LEAST_EXPONENT))
        bins = np.where(norms > 0, above + 1, 0).astype(np.int64)
        return cls(Spread.of(rows), Norms.of(norms), np.bincount(bins, minlength=BINS))

    def __add__(self, other: "Statistics") -> Self:
        return type(self)(
            self.spread + other.spread,
            self.norms + other.norms,
            self.norm_counts + other.norm_counts,
        )

    def outliers(self) -> tuple[int, float]:
        """Number of rows whose norm is over `OUTLYING` times the median, within a bin, and the least fraction of the
        scatter that they can have."""
        edge = OUTLYING * self.norm_quantile(0.5)
        bins = np.arange(BINS)
        middles = 2.0 ** ((bins - 0.5) / BINS_PER_DOUBLING + LEAST_EXPONENT)
        counts = np.where((bins > 0) & (middles > edge), self.norm_counts, 0)
        if not counts.any():
            return 0, 0.0
        norms = np.minimum(middles, self.norms.max)
        distances = np.maximum(norms - np.linalg.norm(self.spread.mean), 0)  # from the mean
        scatter = self.spread.scatter.sum()
        return int(counts.sum()), float(min(1, (counts * distances**2).sum() / scatter))

    def norm_quantile(self, fraction: float) -> float:
        """The quantile of the norms, fraction in (0, 1], to a relative `QUANTILE_ERROR`."""
        wanted = max(1, int(np.ceil(fraction * self.norms.rows)))
        index = int(np.searchsorted(np.cumsum(self.norm_counts), wanted))
        middle = 2.0 ** ((index - 0.5) / BINS_PER_DOUBLING + LEAST_EXPONENT) if index else 0.0
        return min(middle, self.norms.max)


def norm_fields(statistics: Statistics | None) -> dict[str, Any]:
    """The fields of `store.json` on the norms of the rows stored, if any."""
    if statistics is None:
        return {}
    return {
        "norms": statistics.norms,
        "norm_quantiles": {
            f"{fraction:g}": statistics.norm_quantile(fraction) for fraction in QUANTILES
        },
    }

"""Values of rows: stored types (float32, float16, bfloat16), true codes in CSR form, statistics.

Legend: R rows, D = d_in, G features.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import h5py
    from scipy.sparse import csr_array

OUTLYING = 10  # times the median norm


@dataclass(frozen=True)
class StoredType:
    name: str
    storage: np.dtype  # of the bytes; bfloat16 is kept as its bits in a uint16

    @property
    def hdf5(self) -> "h5py.h5t.TypeID":
        import h5py  # `sae list` need not wait for it

        if self.name != "bfloat16":
            return h5py.h5t.py_create(self.storage)
        bfloat16 = h5py.h5t.IEEE_F32LE.copy()
        bfloat16.set_fields(15, 7, 8, 0, 7)
        bfloat16.set_size(2)
        bfloat16.set_ebias(127)
        return bfloat16

    def keeps(self, stored: np.ndarray) -> np.ndarray:
        """Whether each row, (R, D) of the storage dtype, is finite, (R,) bool."""
        if self.name == "bfloat16":
            return ((stored & 0x7F80) != 0x7F80).all(axis=1)
        return np.isfinite(stored).all(axis=1)

    def encode_rows(self, rows: np.ndarray) -> np.ndarray:
        """Rows, (R, D) float32, in the storage dtype, rounded to nearest even; infinite beyond its range."""
        if self.name != "bfloat16":
            with np.errstate(over="ignore"):
                return rows.astype(self.storage)
        import torch  # stores of other types need not wait for it

        return torch.tensor(rows, dtype=torch.bfloat16).view(torch.uint16).numpy()

    def decode_rows(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows, (R, D) of the storage dtype, in float32, contiguous; into `out` if given."""
        out = np.empty(rows.shape, np.float32) if out is None else out
        if self.name != "bfloat16":
            np.copyto(out, rows)
        else:
            np.left_shift(rows, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
        return out


DTYPES = {
    "float32": StoredType("float32", np.dtype("<f4")),
    "float16": StoredType("float16", np.dtype("<f2")),
    "bfloat16": StoredType("bfloat16", np.dtype("<u2")),
}


class TextWindow(NamedTuple):
    """A window of tokens, and which of them are rows."""

    token_ids: np.ndarray  # (T,) int64, of the whole window, the special tokens around a text too
    is_row: np.ndarray  # (T,) bool

    @property
    def length(self) -> int:
        return len(self.token_ids)


CODES = "codes"  # the group of a shard that holds true codes, of the non-zeros in CSR form

Column: TypeAlias = "np.ndarray | csr_array"  # (R,) integers, or true codes of R rows, (R, G)


def codes_datasets(codes: "csr_array") -> dict[str, np.ndarray]:
    return {
        f"{CODES}/offset": codes.indptr.astype("<i8"),
        f"{CODES}/index": codes.indices.astype("<i4"),
        f"{CODES}/value": codes.data.astype("<f4"),
    }


def stacked(parts: Sequence[Column]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    from scipy.sparse import vstack  # `sae list` need not wait for it

    return vstack(parts, format="csr")


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of rows. Massive rows have over `OUTLYING` times the median: attention sinks have 40 to 150.

    Of several shards together the median is the mean of theirs, and massive rows are those of each.
    """

    rows: int
    mean: float
    max: float
    median: float
    massive_rows: int

    @classmethod
    def of(cls, norms: np.ndarray) -> Self:
        """Of finite norms, (R,), R at least 1."""
        median = float(np.median(norms))
        return cls(
            rows=len(norms),
            mean=float(norms.mean()),
            max=float(norms.max()),
            median=median,
            massive_rows=int((norms > OUTLYING * median).sum()),
        )

    def __add__(self, other: "Norms") -> "Norms":
        rows = self.rows + other.rows
        weight = other.rows / rows
        return Norms(
            rows=rows,
            mean=self.mean + (other.mean - self.mean) * weight,
            max=max(self.max, other.max),
            median=self.median + (other.median - self.median) * weight,
            massive_rows=self.massive_rows + other.massive_rows,
        )


def row_norms(rows: np.ndarray) -> np.ndarray:
    """Euclidean norms, (R,) float64, of float rows, (R, D); NaN or infinite where the row is."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))


@dataclass(frozen=True)
class Spread:
    """Mean and scatter, `sum_i (x_i - mean)^2`, of rows, per dimension: (D,) float64 each."""

    rows: int
    mean: np.ndarray
    scatter: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> Self:
        """Of rows, (R, D) float64, R at least 1, which are overwritten; two passes avoid cancellation."""
        mean = np.add.reduce(rows, axis=0) / len(rows)
        rows -= mean
        np.multiply(rows, rows, out=rows)
        return cls(len(rows), mean, np.add.reduce(rows, axis=0))

    @classmethod
    def measured(cls, batches: Iterable[np.ndarray], d_in: int) -> Self:
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
        """The rows outside `part`; a scatter much below the whole's keeps few digits."""
        return self + Spread(-part.rows, part.mean, -part.scatter)

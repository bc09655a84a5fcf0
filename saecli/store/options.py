"""The options of an import. Imports neither NumPy nor torch, so that help pages are fast."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, Lt

from ..base.options import Config, Count, Positive, Seed, Shown

StoredDtype = Literal["float32", "float16", "bfloat16"]  # see `values.py`
FileDtype = Literal["float32", "float16", "bfloat16", "float64", "uint8"]  # of raw binary
SUFFIXES = (
    ".npy, .npz, .safetensors, .index.json, .pt, .pth, .h5, .hdf5, .parquet, .idx or idx3-ubyte (also with .gz), "
    "raw .bin, .raw or .dat"
)
MAX_NORM_HELP = (
    "Drop and count rows whose norm exceeds this multiple of the median norm of the first block (up to "
    "about 16,000 rows, or 16 MiB of an imported file), which the store records; as dictionary_learning "
    "does. A row dropped from one of several stores is dropped from all. Default: no limit."
)


@dataclass(frozen=True)
class ImportConfig(Config):
    """The options that determine the rows of an import, in addition to the files."""

    panel: ClassVar[str] = "Rows"

    key: Annotated[
        str | None,
        Shown(
            "Which array of a file; needed if several may be meant. A pattern such as '*' takes all that "
            "match, in the order of the numbers in their keys."
        ),
    ] = None
    index: Annotated[
        str | None,
        Shown("Which layer or head: a number or : for each axis, ':,6' for x[:, 6]."),
    ] = None
    flatten: Annotated[
        Literal["positions", "features"] | None,
        Shown(
            "Rows of an array of more than two dimensions: positions, each vector along the last of (batch, position, "
            "width), split into training and test rows by whole sequences; features, each element of the first "
            "dimension, such as an image. Default: features for idx files, others are refused."
        ),
    ] = None
    transpose: Annotated[bool, Shown("Take the columns of a matrix as rows.")] = False
    mask: Annotated[
        str | None, Shown("Leave out positions where this array is 0, such as attention_mask.")
    ] = None
    drop_zeros: Annotated[bool, Shown("Leave out rows that are all 0.")] = False
    max_norm_multiple: Annotated[float | None, Ge(1), Shown(MAX_NORM_HELP)] = None
    shape: Annotated[
        str | None, Shown("Shape of raw binary: 1000,768, or -1,768 for all of a file.")
    ] = None
    dtype: Annotated[
        FileDtype | None,
        Shown(
            "Precision of the stored rows; default: the file's own if it is float16 or "
            "bfloat16, else float32. Of raw binary the type of its numbers, float64 and uint8 too."
        ),
    ] = None
    shard_rows: Annotated[
        Count | None,
        Shown("Rows in a shard file. Default: 64 MiB, of synthetic rows at most 32,768."),
    ] = None


@dataclass(frozen=True)
class SyntheticConfig(Config):
    """What decides the rows of `sae import synthetic`.

    The structure is SynthSAEBench's: Zipfian firing probabilities, trees in which a feature fires only with its parent,
    a Gaussian copula of rank 25, nearly orthogonal unit directions, magnitudes of mean 1 and a standard deviation
    |N(0.2, 0.1)| per feature, a bias of norm 1. Unlike there, trees end two levels below their roots, siblings do not
    exclude each other, and a feature's Gaussian is uncorrelated with its ancestors', so that L0 is as requested.

    Source: D. Chanin and A. Garriga-Alonso, "SynthSAEBench: Evaluating Sparse Autoencoders on Scalable Realistic
    Synthetic Data", 2026, arXiv:2602.14687.
    """

    panel: ClassVar[str] = "Synthetic worlds"

    features: Annotated[int, Ge(2), Le(2**20), Shown("Known features that rows are made of.")] = (
        1024
    )
    d_in: Annotated[int, Ge(1), Le(2**20), Shown("Dimensions of a row.")] = 128
    rows: Annotated[Count, Shown("Rows to store.")] = 100_000
    seed: Annotated[Seed, Shown("Another seed gives other rows and another world.")] = 0
    l0: Annotated[Positive, Shown("Features active on a row, in the mean.")] = 10.0
    zipf: Annotated[
        float,
        Ge(0),
        Le(10),
        Shown(
            "Exponent s: the i-th most frequent feature fires on c / i^s of the rows, at most on 0.4."
        ),
    ] = 0.5
    hierarchy: Annotated[
        bool,
        Shown(
            "Let two thirds of the features stand in trees: one root in 32 features, two levels "
            "below it, 4 children to a parent; a child fires only with its parent."
        ),
    ] = True
    correlation: Annotated[
        float,
        Ge(0),
        Lt(1),
        Shown(
            "Fraction of the variance of each feature's Gaussian that comes from 25 shared "
            "ones; a feature fires where its Gaussian is high."
        ),
    ] = 0.25

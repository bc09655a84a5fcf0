"""The options of an import. Imports neither NumPy nor torch, so that help pages are fast."""

from dataclasses import dataclass
from typing import ClassVar

from ..base.options import Config, option

DTYPES = ("float32", "float16", "bfloat16")  # of stored rows; see `values.py`
FLATTEN = ("positions", "features")
BITS = ("bfloat16",)
MAX_NORM_HELP = (
    "Drop and count rows whose norm exceeds this multiple of the median norm of the first block (up to "
    "about 10,000 rows, or 16 MiB of an imported file), which the store records; dictionary_learning's "
    "max_activation_norm_multiple; default: no limit."
)


@dataclass(frozen=True)
class ImportConfig(Config):
    """The options that determine the rows of an import, in addition to the file."""

    panel: ClassVar[str] = "Rows"

    key: str | None = option(None, "Which array of the file; needed if it holds several.")
    flatten: str | None = option(
        None,
        "Rows of an array of more than two dimensions: positions, each vector along the "
        "last of (batch, position, width), split into training and test rows by whole "
        "sequences; features, each element of the first dimension, such as an image. "
        "Default: features for idx files, others are refused.",
        choices=FLATTEN,
    )
    bits: str | None = option(
        None,
        "What the bits of 2-byte integers, or of 2 bytes without a type, stand for, as NumPy shows "
        "bfloat16 of JAX and Keras. Other integers than bytes of images are refused.",
        choices=BITS,
    )
    max_norm_multiple: float | None = option(None, MAX_NORM_HELP, minimum=1)
    dtype: str | None = option(
        None,
        "Precision of the stored rows; default: the file's own if it is float16 or "
        "bfloat16, else float32.",
        choices=DTYPES,
    )
    shard_rows: int | None = option(
        None,
        "Rows in a shard file. Default: 64 MiB, of synthetic rows at most 32,768.",
        minimum=1,
        maximum=2**31 - 1,
    )


@dataclass(frozen=True)
class SyntheticConfig(Config):
    """What decides the rows of `sae import synthetic`.

    The structure is SynthSAEBench's: Zipfian firing probabilities, trees in which a feature fires only with its parent,
    a Gaussian copula of rank 25, nearly orthogonal unit directions, magnitudes of mean 1 and a standard deviation
    |N(0.2, 0.1)| per feature, a bias of norm 1. Unlike there, trees end two levels below their roots, siblings do not
    exclude each other, and a feature's Gaussian is uncorrelated with its ancestors', so that firing rates and L0 are
    as requested.

    Source: D. Chanin and A. Garriga-Alonso, "SynthSAEBench: Evaluating Sparse Autoencoders on Scalable Realistic
    Synthetic Data", 2026, arXiv:2602.14687.
    """

    panel: ClassVar[str] = "Synthetic worlds"

    features: int = option(1024, "Known features that rows are made of.", minimum=2, maximum=2**20)
    d_in: int = option(128, "Dimensions of a row.", minimum=1, maximum=2**20)
    rows: int = option(100_000, "Rows to store.", minimum=1, maximum=2**31 - 1)
    seed: int = option(0, "Another seed gives other rows and another world.", minimum=0)
    l0: float = option(10.0, "Features active on a row, in the mean.", above=0)
    zipf: float = option(
        0.5,
        "Exponent s: the i-th most frequent feature fires on c / i^s of the rows, at most on 0.4.",
        minimum=0,
        maximum=10,
    )
    hierarchy: bool = option(
        True,
        "Let two thirds of the features stand in trees: one root in 32 features, two levels "
        "below it, 4 children to a parent; a child fires only with its parent.",
    )
    correlation: float = option(
        0.25,
        "Fraction of the variance of each feature's Gaussian that comes from 25 shared "
        "ones; a feature fires where its Gaussian is high.",
        minimum=0,
        below=1,
    )

"""The options of training that are common to all solvers. Imports no torch, so that help pages are fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..base.errors import ConfigError
from ..base.options import Config, option
from ..sae.activations import sparsity_names
from .files import TRACKERS, check_trackers

if TYPE_CHECKING:
    from ..sae.codes import Prefixes
    from ..store.joined import Joined, JoinedRows
    from ..store.reader import ActivationStore
    from ..store.reader import Rows as StoredRows

DEFAULT_STEPS = 4000  # optimiser steps that the defaults aim at
MOST_DEFAULT_EPOCHS = 100
WARM_UP = 0.02  # fraction of all steps over which the learning rate rises
DECAY = 0.5  # last fraction of all steps, over which it falls to zero
PENALTY_WARM_UP = 0.2  # fraction of all steps over which the sparsity penalty rises
WIDEST = 0.55  # width of smoothing if rows are few
NORMALISATIONS = ("scale", "standardize", "none")
SMALLEST = 2**18  # encoder weights from which auto picks bf16
MOST_WEIGHT = 1e12  # of a penalty: the square of its gradient must be finite in float32


def check_prefixes(text: str) -> None:
    """Raise a ValueError, whose message completes "the option must be", for an invalid `--prefixes`."""
    words = text.split(",")
    numbers = [int(word) for word in words if word.strip().isdecimal()]
    rise = all(before < after for before, after in pairwise((0, *numbers)))
    if text != "auto" and (len(numbers) < len(words) or not rise):
        raise ValueError("auto, or numbers of latents with commas between, each larger than the one before")


@dataclass(frozen=True)
class TrainingConfig(Config):
    """The options common to all solvers."""

    panel: ClassVar[str] = "Training"

    d_sae: int | None = option(None, "Number of latents. Default: 4 d_in.", minimum=1)
    prefixes: str | None = option(None, "Matryoshka: for each N, the first N latents alone must reconstruct the input. "
                                        "auto: a 16th, a quarter and half of d_sae. Default: not nested.",
                                  check=check_prefixes, metavar="auto|N,N,...")
    skip: bool = option(False, "Add an affine skip from rows to targets to a transcoder; pam-sgd solves for it with "
                               "the decoder.", advanced=True)
    epochs: int | None = option(None, f"Passes over the training rows. Default: enough for {DEFAULT_STEPS} batches, at "
                                      f"most {MOST_DEFAULT_EPOCHS}.", minimum=1, once=True)
    steps: int | None = option(None, "Optimiser steps, instead of --epochs.", minimum=1, once=True)
    batch_size: int = option(256, "Rows per batch.", minimum=1, once=True)
    lr: float | str = option("auto", "Peak learning rate. auto: from the spread of the rows and the firing rate.",
                             choices=("auto",), above=0)
    lr_warm_up: float = option(WARM_UP, "Fraction of all steps over which the learning rate rises from 0.",
                               minimum=0, maximum=1, advanced=True)
    lr_decay: float = option(DECAY, "Last fraction of all steps, over which the learning rate falls to 0.",
                             minimum=0, maximum=1, advanced=True)
    smoothing: float | str = option("auto", "Move each training row along differences of other rows, by this fraction "
                                            f"of its norm, against overfitting. auto: {WIDEST}, falling as 1/sqrt(rows)"
                                            " beyond max(d_sae, 4 d_in) rows.",
                                    choices=("auto",), minimum=0, maximum=10, advanced=True)
    sparsity: str | None = option(None, "Penalty on the codes z of a row: l1, sum of |z_i| ||W_dec_i||; l0, number of "
                                        "active latents; target-l0, square of its excess over --target-l0; kl, "
                                        "divergence of firing rates from --target-rate; l1-codes, sum of |z_i|. "
                                        "Default: l1 with relu, target-l0 with jumprelu, else none.",
                                  choices=sparsity_names())
    sparsity_weight: float | None = option(
        None, "Weight of the penalty next to a row's squared error (rows have mean squared norm d_in). Default: "
              " l1 0.1 sqrt(d_in), l0 0.001 d_in, target-l0 0.05 d_in, kl 0.01 d_in.",
        minimum=0, maximum=MOST_WEIGHT)
    sparsity_warm_up: float = option(PENALTY_WARM_UP, "Fraction of all steps over which the penalty's weight rises "
                                                      "from 0.", minimum=0, maximum=1, advanced=True)
    fraction: float = option(1.0, "Fraction of the training rows to use; does not change the held-out tenth of the "
                                  "documents.",
                             above=0, maximum=1, once=True, advanced=True)
    split_seed: int = option(0, "Seed of the choice of held-out test rows.", minimum=0, once=True, advanced=True)
    seed: int = option(0, "Seed of everything random except the order of the rows.", minimum=0)
    shuffle_seed: int = option(0, "Seed of the order of the rows.", minimum=0, once=True, advanced=True)
    normalize: str = option("scale", "Normalise rows, folded into the saved weights. scale: centre and divide by one "
                                     "number; standardize: unit variance per dimension.",
                            choices=NORMALISATIONS, once=True, advanced=True)
    keep_every: int | None = option(None, "Also keep the SAE of every N-th epoch, as RUN/kept/epoch-N.",
                                    minimum=1, once=True, metavar="N", advanced=True)
    log_to: str | None = option(None, f"Also log to {', '.join(TRACKERS)}, or several with commas between. "
                                      "Project: WANDB_PROJECT, TRACKIO_PROJECT, else saecli.",
                                check=check_trackers, metavar="NAME,...", once=True, advanced=True)
    device: str = option("auto", "Where to train: cpu, cuda, cuda:1. auto: cuda if available.", once=True)
    dtype: str = option("float32", "Precision of weights and steps; decoder steps always sum in float64.",
                        choices=("float32", "float64"), once=True, advanced=True)
    precision: str = option("auto", "Precision of matrix products in descent steps; bf16 sums in float32. auto: bf16 "
                                    f"if the device has it and d_in d_sae is at least {SMALLEST:,}, else float32.",
                            choices=("float32", "tf32", "bf16", "auto"), once=True, advanced=True)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The resolved configuration that `to_json` wrote; ConfigError also if a field is missing that `settled` fills
        in."""
        missing = sorted({"d_sae", "epochs", "steps", "sparsity", "sparsity_weight"} - document.keys())
        if missing:
            raise ConfigError(f"{cls.__name__} does not match: missing {missing}")
        return super().from_json(document)

    @property
    def nested(self) -> Prefixes:
        """The prefixes of a resolved configuration; empty if not nested."""
        return tuple(map(int, self.prefixes.split(","))) if self.prefixes else ()

    def rows_of(self, store: ActivationStore | Joined) -> StoredRows | JoinedRows:
        """The training rows of a store, or of several joined."""
        return store.split("train", fraction=self.fraction, seed=self.split_seed)

    def test_rows_of(self, store: ActivationStore | Joined) -> StoredRows | JoinedRows:
        """The held-out rows of a store."""
        return store.split("test", seed=self.split_seed)

    def batches(self, rows: int) -> int | None:
        """Batches in all of a resolved training; None if it is given in optimiser steps."""
        return None if self.steps or self.epochs is None else self.epochs * self.epoch_batches(rows)

    def epoch_batches(self, rows: int) -> int:
        """Batches in one pass over the rows."""
        return math.ceil(rows / self.batch_size)

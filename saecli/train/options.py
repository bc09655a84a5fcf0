"""The options of `sae train`, those common to all solvers, then each solver's; and of `sae finetune`.

Imports no torch, so that help pages are fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from ..base.errors import ConfigError
from ..base.options import (
    Advanced,
    Check,
    Config,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Seed,
    Shown,
    options_from,
    options_of,
)
from ..base.processes import ALONE, Communicator
from ..extract.options import ExtractConfig
from ..extract.readers import STDLIB_DOCS, TEXT_FILES
from ..model import ModelDtype
from ..sae.activations import sparsity_names

if TYPE_CHECKING:
    from ..sae.codes import Prefixes
    from ..sae.dictionary import SAE
    from ..store.reader import RowSource

# SmolLM2, layer 15, L0 32: FVU 0.172, KL 0.285; relu with L1 0.196, 0.355.
DEFAULT_ACT = "batchtopk"
DEFAULT_STEPS = 4000  # optimiser steps that the defaults aim at
MOST_DEFAULT_EPOCHS = 1000
TRAIN_ON = 0.25  # learning rate with --init, over sgd's of DEFAULT_STEPS from random directions
PENALTY_WARM_UP = 0.2  # fraction of all steps over which the sparsity penalty rises
EXPANSION = 4  # default number of latents per dimension
WIDEST = 0.55  # width of smoothing if rows are few
Normalize = Literal["auto", "model", "scale", "standardize", "none", "init"]
Precision = Literal["float32", "bf16", "auto"]
SMALLEST = 2**18  # encoder weights from which auto picks bf16
# Part of the training documents that is trained on where others are kept out to compare SAEs or set thresholds on: on
# rows that were fitted L0 is lower, of 20,000 rows of SmolLM2 33 where it is 53 on held-out ones.
TRAINED = 0.9
MEASURED_ROWS = 16_384  # of a text without a store, to measure on

REVIVAL_ROWS = 2  # least rows per latent for revival: with fewer, latents idle for lack of rows
RELEASE = 0.5  # fraction of all steps after which the decoder may be released
RELEASED_BELOW = 0.6  # alpha over the mean Gram diagonal; above, the decoder is held to the end


def check_prefixes(text: str) -> str:
    """The text; ValueError, whose message completes "the option must be", if invalid."""
    words = text.split(",")
    numbers = [int(word) for word in words if word.strip().isdecimal()]
    rise = all(before < after for before, after in pairwise((0, *numbers)))
    if text != "auto" and (len(numbers) < len(words) or not rise):
        raise ValueError(
            "auto, or numbers of latents with commas between, each larger than the one before"
        )
    return text


@dataclass(frozen=True)
class TrainingConfig(Config):
    panel: ClassVar[str] = "Training"

    d_sae: Annotated[Count | None, Shown(f"Number of latents. Default: {EXPANSION} d_in.")] = None
    prefixes: Annotated[
        Annotated[str, Check(check_prefixes)] | None,
        Shown(
            "Matryoshka: for each N, the first N latents alone must reconstruct the input. "
            "auto: a 16th, a quarter and half of d_sae. Default: not nested.",
            metavar="auto|N,N,...",
        ),
    ] = None
    skip: Annotated[
        bool,
        Advanced(
            "Add an affine skip from rows to targets to a transcoder; pam-sgd solves for it with the decoder."
        ),
    ] = False
    k_start: Annotated[
        Count | None,
        Advanced(
            "Active latents per row at the start; they fall to --k over the first half of the steps. Default: --k."
        ),
    ] = None
    epochs: Annotated[
        Count | None,
        Shown(
            f"Passes over the training rows. Default: enough for {DEFAULT_STEPS} batches, at "
            f"most {MOST_DEFAULT_EPOCHS}.",
            once=True,
        ),
    ] = None
    steps: Annotated[Count | None, Shown("Optimiser steps, instead of --epochs.", once=True)] = None
    batch_size: Annotated[Count, Shown("Rows per batch.", once=True)] = 256
    lr: Annotated[
        Positive | Literal["auto"],
        Shown(
            "Peak learning rate. auto: from the dimensions of the rows and the firing rate, higher for fewer than "
            f"{DEFAULT_STEPS:,} steps, most where the decoder is solved for; with --init {TRAIN_ON:g} of sgd's."
        ),
    ] = "auto"
    lr_warm_up: Annotated[
        Fraction, Advanced("Fraction of all steps over which the learning rate rises from 0.")
    ] = 0.02
    lr_decay: Annotated[
        Fraction, Advanced("Last fraction of all steps, over which the learning rate falls to 0.")
    ] = 0.5
    smoothing: Annotated[
        Annotated[float, Ge(0), Le(10)] | Literal["auto"],
        Advanced(
            "Move each training row along differences of other rows, by this fraction "
            f"of its norm, against overfitting. auto: {WIDEST}, falling as 1/sqrt(rows)"
            f" beyond max(d_sae, {EXPANSION} d_in) rows; 0 with --init."
        ),
    ] = "auto"
    sparsity: Annotated[
        str | None,
        Shown(
            "Penalty on the codes z of a row: l1, sum of |z_i| ||W_dec_i||; l0, number of active latents; target-l0, "
            "square of its excess over --target-l0, with gated l1 of the weight that gives it. Default: l1 with relu, "
            "target-l0 with jumprelu and gated, else none.",
            metavar=f"<{'|'.join(sparsity_names())}>",
        ),
    ] = None
    sparsity_weight: Annotated[
        float | None,
        Ge(0),
        Le(1e12),  # the square of the gradient must be finite in float32
        Shown(
            "Weight of the penalty next to a row's squared error (rows have mean squared norm d_in). Default: "
            "l1 0.1 sqrt(d_in), l0 0.001 d_in, target-l0 0.05 d_in (with gated as l1, at the start)."
        ),
    ] = None
    sparsity_warm_up: Annotated[
        Fraction | None,
        Advanced(
            "Fraction of all steps over which the penalty's weight rises from 0. "
            f"Default: {PENALTY_WARM_UP}, with --init 0."
        ),
    ] = None
    fraction: Annotated[
        float,
        Gt(0),
        Le(1),
        Advanced(
            f"Fraction of the training rows to use, with --init at most {TRAINED:g}, as with batchtopk, jumprelu and "
            "gated, which set thresholds on the others. Does not change the held-out tenth of the documents.",
            once=True,
        ),
    ] = 1.0
    split_seed: Annotated[
        Seed, Advanced("Seed of the choice of held-out test rows.", once=True)
    ] = 0
    seed: Annotated[
        Seed, Shown("Seed of everything random except the order of the rows; of it 32 bits count.")
    ] = 0
    shuffle_seed: Annotated[Seed, Advanced("Seed of the order of the rows.", once=True)] = 0
    normalize: Annotated[
        Normalize,
        Advanced(
            "Normalise rows, folded into the saved weights; the SAE keeps the scales. scale: centre and divide by "
            "one number; model: also multiply each dimension by the root of the weight with which norms of later "
            "blocks read it; standardize: unit variance per dimension; init: in the metric of --init's SAE. auto: "
            "init, if that SAE knows its metric, else model, if the store knows the weights, else scale.",
            once=True,
        ),
    ] = "auto"
    checkpoint_every: Annotated[
        Count,
        Advanced(
            "Steps between checkpoints within an epoch; there is one after every epoch.",
            once=True,
            metavar="N",
        ),
    ] = 1000
    log_to: Annotated[
        Literal["wandb"] | None,
        Advanced("Also log to Weights & Biases. Project: WANDB_PROJECT, else saecli.", once=True),
    ] = None
    device: Annotated[
        str, Shown("Where to train: cpu, cuda, cuda:1. auto: cuda if available.", once=True)
    ] = "auto"
    dtype: Annotated[
        Literal["float32", "float64"],
        Advanced("Precision of weights and steps; decoder steps always sum in float64.", once=True),
    ] = "float32"
    precision: Annotated[
        Precision,
        Advanced(
            "Precision of matrix products in descent, and of the codes of all decoder steps but the last; bf16 sums "
            f"in float32. auto: bf16 if the device has it and d_in d_sae is at least {SMALLEST:,}, else float32.",
            once=True,
        ),
    ] = "auto"

    @property
    def nested(self) -> Prefixes:
        """Of a resolved configuration; empty if not nested."""
        return tuple(map(int, self.prefixes.split(","))) if self.prefixes else ()

    @property
    def penalised(self) -> bool:
        """Whether a penalty of fixed weight decides L0."""
        return self.sparsity not in (None, "none", "target-l0")

    def latents(self, d_in: int) -> int:
        return self.d_sae or EXPANSION * d_in

    def epoch_batches(self, rows: int) -> int:
        return math.ceil(rows / self.batch_size)


@dataclass(frozen=True)
class SolverConfig(Config):
    """Base of the options of solvers; class variables are defaults."""

    panel: ClassVar[str] = "Solver"
    name: ClassVar[str]
    command: ClassVar[str] = "train"  # of the runs that it makes
    # `module:function` in this package, imported when the solver is built.
    implementation: ClassVar[str]

    smooths: ClassVar[bool] = True  # unless `--smoothing` says
    descending: ClassVar[int] = 2  # weight matrices trained by gradient: encoder and decoder

    @property
    def can_fix(self) -> tuple[str, ...]:
        """Weights that training can leave as they are, one at a time."""
        return ("W_enc",)

    def check(self, training: TrainingConfig, rows: RowSource) -> None:
        """ConfigError for training settings, or rows, that cannot work with the solver's options."""

    def build(self, initial: SAE, task: Any, communicator: Communicator = ALONE) -> Any:
        """A `Solver` of a `Task`, from a copy of `initial`."""
        module, name = self.implementation.split(":")
        return getattr(import_module(f".{module}", __package__), name)(
            initial, task, self, communicator
        )


@dataclass(frozen=True)
class Paper(Config):
    """Options that only the paper's experiments need."""

    clip_norm: Annotated[
        Positive | None, Advanced("Clip the gradient of a batch's mean loss to this norm.")
    ] = None
    weight_decay: Annotated[
        NonNegative,
        Advanced(
            "Weight of ||W_enc||^2, with sgd of ||W_dec||^2 too, next to the squared error summed over all rows."
        ),
    ] = 0.0
    mu_enc: Annotated[
        NonNegative,
        Advanced(
            "Proximal weight of ||W_enc - W_enc^t||^2, next to the squared error summed over all "
            "rows; t counts decoder steps, with sgd epochs."
        ),
    ] = 0.0
    nu_enc: Annotated[
        NonNegative, Advanced("Proximal weight of ||b_enc - b_enc^t||^2, as --mu-enc.")
    ] = 0.0


@dataclass(frozen=True)
class Revival(Config):
    """The option of solvers that look after dead latents."""

    revive: Annotated[
        bool,
        Advanced(
            "Re-aim dead latents, with pam-sgd also those that are missed least, at the "
            f"rows reconstructed worst, where there are at least {REVIVAL_ROWS} rows per latent. "
            "With --init only before the first step, those that fire on none of the rows."
        ),
    ] = True


@dataclass(frozen=True)
class Sgd(Paper, Revival, SolverConfig):
    name: ClassVar[str] = "sgd"
    implementation: ClassVar[str] = "solver:SgdSolver"

    tied: Annotated[
        bool,
        Advanced(
            "Tie the decoder to the encoder: W_dec = W_enc'; with --target W_enc' B, B the "
            "targets' regression on the rows."
        ),
    ] = False

    @property
    def can_fix(self) -> tuple[str, ...]:
        return () if self.tied else ("W_enc", "W_dec")


@dataclass(frozen=True)
class ClosedForm(SolverConfig):
    """Options of solvers with a decoder step; penalties are in units of the squared error summed over all rows."""

    descending: ClassVar[int] = 1  # the decoder is solved for

    alpha: Annotated[
        NonNegative | Literal["auto"],
        Shown(
            "Ridge of the decoder step: weight of ||W_dec - c W_enc'||^2, with --solver pam of ||W_dec||^2, next to "
            "the squared error summed over all rows. auto: the best by leave-one-out."
        ),
    ] = "auto"
    solve: Annotated[
        Literal["auto", "direct", "iterative"],
        Advanced(
            "How to solve for the decoder: direct, by factorising a d_sae x d_sae matrix in float64, slow on consumer "
            "GPUs; iterative, without it, to a residual of 1e-4. auto: direct where it fits in memory."
        ),
    ] = "auto"


@dataclass(frozen=True)
class Pam(Paper, ClosedForm):
    name: ClassVar[str] = "pam"
    implementation: ClassVar[str] = "pam:PamSolver"
    smooths: ClassVar[bool] = False

    beta: Annotated[
        NonNegative,
        Advanced("Weight of ||b_dec||^2, next to the squared error summed over all rows."),
    ] = 0.0
    mu_dec: Annotated[
        NonNegative, Advanced("Proximal weight of ||W_dec - W_dec^t||^2, as --mu-enc.")
    ] = 0.0
    nu_dec: Annotated[
        NonNegative, Advanced("Proximal weight of ||b_dec - b_dec^t||^2, as --mu-enc.")
    ] = 0.0

    def check(self, training: TrainingConfig, rows: RowSource) -> None:
        if rows.ready < rows.rows:
            raise ConfigError(
                f"--solver pam needs all rows in memory, at most {rows.ready:,} with --model, got {rows.rows:,}; lower "
                "--rows, or make a store by `sae extract`"
            )


@dataclass(frozen=True)
class PamSgd(Revival, ClosedForm):
    name: ClassVar[str] = "pam-sgd"
    implementation: ClassVar[str] = "pam_sgd:PamSgdSolver"

    decoder_every: Annotated[
        Count | Literal["auto"],
        Advanced(
            "Optimiser steps between decoder steps. auto: for 20 decoder steps in all, or if their "
            "passes would take more than half of the rows of the optimiser steps, one per epoch."
        ),
    ] = "auto"
    release: Annotated[
        Fraction | Literal["auto"],
        Advanced(
            "Fraction of steps after which W_dec is also trained by gradient. auto: "
            f"{RELEASE}, if alpha is then below {RELEASED_BELOW} of the mean Gram diagonal, else and for "
            "matching-pursuit never; 0 for transcoders. 1: never."
        ),
    ] = "auto"


# Of `sae extract`, for a text instead of a store.
TEXT = (
    "dataset",
    "mix",
    "dataset_config",
    "dataset_split",
    "dataset_revision",
    "text_column",
    "context",
)


@dataclass(frozen=True)
class Finetune(SolverConfig):
    name: ClassVar[str] = "finetune"
    command: ClassVar[str] = "finetune"
    implementation: ClassVar[str] = "through:ThroughModel"

    model: Annotated[
        str | None,
        Shown(
            "Language model: hub id, folder or GGUF file. Default: the one that RUN names.",
            once=True,
        ),
    ] = None
    model_revision: Annotated[
        str | None,
        Shown("Branch, tag or commit of a hub model. Default: the one that RUN names.", once=True),
    ] = None
    model_dtype: Annotated[
        ModelDtype, Advanced("Precision of the language model, as of `sae extract`.", once=True)
    ] = "auto"
    layer: Annotated[
        Seed | None, Advanced("Block where RUN acts, if it does not say.", once=True)
    ] = None
    site: Annotated[
        str | None, Advanced("Hook point in the block, if RUN does not say.", once=True)
    ] = None
    module: Annotated[
        str | None, Advanced("Or the module where RUN acts, if it does not say.", once=True)
    ] = None
    tokens: Annotated[
        Count, Shown("Tokens to train on; shorter text is passed over again.", once=True)
    ] = 500_000
    objective: Annotated[
        Literal["kl", "ce"],
        Shown(
            "What the spliced model's predictions are trained for: kl, the model's own predictions; ce, the next token."
        ),
    ] = "kl"
    fvu_weight: Annotated[
        NonNegative, Shown("Weight of FVU next to the objective, in nats per token.")
    ] = 5.0
    only: Annotated[
        Literal["decoder"] | None,
        Shown("Train the decoder alone, so that codes stay. Default: encoder and decoder."),
    ] = None


_FINETUNE_HELP = {
    "lr": "Peak learning rate, falling to 0. auto: a quarter of `sae train --solver sgd`'s.",
    "seed": "Seed of the order of the windows.",
    "dataset": f"Stream this text instead of a store's tokens: a hub dataset id; a {TEXT_FILES}; or "
    f"{STDLIB_DOCS}.",
}
FINETUNED = (
    *options_from(Finetune, options_of(Finetune), {}, panel="Training"),
    *options_from(
        TrainingConfig, ("lr", "seed", "log_to", "device"), _FINETUNE_HELP, panel="Training"
    ),
    *options_from(
        ExtractConfig, TEXT, _FINETUNE_HELP, panel="Text without a store", once=True, advanced=True
    ),
)

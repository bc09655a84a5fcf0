"""The settings of training: the options common to all solvers, and the resolved plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from ..base.devices import device_named
from ..base.errors import ConfigError, flag_of
from ..base.options import Config, option
from ..base.precision import PRECISIONS, multiplies_bf16
from ..sae.activations import Activation, sparsity_names
from ..sae.codes import Prefixes, rise
from ..store.joined import Joined, JoinedRows
from ..store.reader import ActivationStore
from ..store.rows import Rows as StoredRows
from .live import LiveRows
from .logs import TRACKERS, check_trackers
from .normalisation import NORMALISATIONS
from .rows import AnyRows
from .smoothing import WIDEST, default_width
from .solver import DECAY, DEFAULT_STEPS, PENALTY_WARM_UP, WARM_UP, SolverConfig
from .starting import Start

MOST_DEFAULT_EPOCHS = 100
AUTO_PREFIXES = (16, 4, 2, 1)  # latents per latent of each prefix
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SMALLEST = 2**18  # weights of the encoder, from which on products in bf16 repay the rounding of their factors
MOST_WEIGHT = 1e12  # of a penalty: the square of its gradient must be finite in float32


def check_prefixes(text: str) -> None:
    """Refuse a text that does not say how a dictionary is nested, by a ValueError whose message completes "the option
    must be"."""
    words = text.split(",")
    numbers = [int(word) for word in words if word.strip().isdecimal()]
    if text != "auto" and (len(numbers) < len(words) or not rise(numbers)):
        raise ValueError("auto, or numbers of latents with commas between, each larger than the one before")


@dataclass(frozen=True)
class TrainingConfig(Config):
    """The options common to all solvers."""

    panel: ClassVar[str] = "Training"

    d_sae: int | None = option(None, "Number of latents; default: 4 d_in.", minimum=1)
    prefixes: str | None = option(None, "Nested (Matryoshka) dictionary: train the first latents, as many as each of "
                                        "these numbers says, to reconstruct rows without the others. auto: a 16th, a "
                                        "quarter and half of d_sae. Default: not nested.",
                                  check=check_prefixes, metavar="auto|N,N,...")
    skip: bool = option(False, "Transcoder with an affine skip from rows to targets, which pam-sgd solves for together "
                               "with the decoder.", advanced=True)
    epochs: int | None = option(None, f"Passes over the training rows; default: enough for {DEFAULT_STEPS} batches, at "
                                      f"most {MOST_DEFAULT_EPOCHS}.", minimum=1, once=True)
    steps: int | None = option(None, "Optimiser steps, in place of --epochs.", minimum=1, once=True)
    batch_size: int = option(256, "Rows per batch.", minimum=1, once=True)
    lr: float | str = option("auto", "Peak learning rate. auto: for Adam, from the spread of the rows and "
                                     "how often latents fire.",
                             choices=("auto",), above=0)
    lr_warm_up: float = option(WARM_UP, "Fraction of all steps over which the learning rate rises from 0.",
                               minimum=0, maximum=1, advanced=True)
    lr_decay: float = option(DECAY, "Fraction of all steps, the last ones, over which the learning rate falls to 0.",
                             minimum=0, maximum=1, advanced=True)
    smoothing: float | str = option("auto", "Noise against overfitting: each training row is moved along differences "
                                            f"of other rows, by this fraction of its norm. auto: {WIDEST}, falling as "
                                            "1/sqrt(rows) once there are more rows than latents and than 4 d_in.",
                                    choices=("auto",), minimum=0, maximum=10, advanced=True)
    sparsity: str | None = option(None, "Penalty on the codes z of a row: l1, sum of |z_i| ||W_dec_i||; l0, number of "
                                        "active latents; target-l0, square of its excess over --target-l0; kl, "
                                        "divergence of firing rates from --target-rate; l1-codes, sum of |z_i|. "
                                        "Default: l1 with relu, target-l0 with jumprelu, else none.",
                                  choices=sparsity_names())
    sparsity_weight: float | None = option(
        None, "Weight of the penalty beside the squared error of a row, rows having a mean squared norm of d_in. "
              "Default: l1 0.1 sqrt(d_in), l0 0.001 d_in, target-l0 0.05 d_in, kl 0.01 d_in.",
        minimum=0, maximum=MOST_WEIGHT)
    sparsity_warm_up: float = option(PENALTY_WARM_UP, "Fraction of all steps over which the penalty's weight rises "
                                                      "from 0.", minimum=0, maximum=1, advanced=True)
    fraction: float = option(1.0, "Fraction of the training rows to use. The held-out test rows, a tenth of the "
                                  "documents, stay the same.",
                             above=0, maximum=1, once=True, advanced=True)
    split_seed: int = option(0, "Seed that chooses the held-out test rows.", minimum=0, once=True, advanced=True)
    seed: int = option(0, "Seed of all that is random, but for the order of the rows.", minimum=0)
    shuffle_seed: int = option(0, "Seed of the order of the rows.", minimum=0, once=True, advanced=True)
    normalize: str = option("scale", "Normalisation of the rows, folded into the saved weights: scale centres them and "
                                     "divides by one number; standardize gives each dimension unit variance.",
                            choices=NORMALISATIONS, once=True, advanced=True)
    keep_every: int | None = option(None, "Also keep the SAE of every N-th epoch, as RUN/kept/epoch-N, which eval, "
                                          "sparsity and geometry take.",
                                    minimum=1, once=True, metavar="N", advanced=True)
    log_to: str | None = option(None, f"Also log to {', '.join(TRACKERS)}, or several with commas between; each is an "
                                      "extra. WANDB_PROJECT, TRACKIO_PROJECT name another project than saecli.",
                                check=check_trackers, metavar="NAME,...", once=True, advanced=True)
    device: str = option("auto", "Where to train: cpu, cuda, cuda:1. auto: cuda where there is one.", once=True)
    dtype: str = option("float32", "Precision of weights and steps; the decoder step sums in float64 in any case.",
                        choices=tuple(DTYPES), once=True, advanced=True)
    precision: str = option("auto", "Precision in which descent steps multiply matrices: float32; tf32; bf16, with "
                                    "sums in float32. All else is in float32, decoder steps and measures too. auto: "
                                    f"bf16 where the device has it and d_in d_sae is at least {SMALLEST:,}, else "
                                    "float32.",
                            choices=PRECISIONS, once=True, advanced=True)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The resolved configuration that `to_json` wrote; see `Config.from_json`.

        Raises:
            ConfigError: as there, or a field is missing that `resolved` fills in.
        """
        missing = sorted({"d_sae", "epochs", "steps", "sparsity", "sparsity_weight"} - document.keys())
        if missing:
            raise ConfigError(f"{cls.__name__} does not match: missing {missing}")
        return super().from_json(document)

    @property
    def nested(self) -> Prefixes:
        """The prefixes of a resolved configuration; none if the dictionary is not nested."""
        return tuple(map(int, self.prefixes.split(","))) if self.prefixes else ()

    def rows_of(self, store: ActivationStore | Joined) -> StoredRows | JoinedRows:
        """The rows of a store, or of several joined, to train on; StoreError if the split leaves none."""
        return store.split("train", fraction=self.fraction, seed=self.split_seed)

    def test_rows_of(self, store: ActivationStore | Joined) -> StoredRows | JoinedRows:
        """The held-out rows of a store; StoreError if the split leaves none."""
        return store.split("test", seed=self.split_seed)

    def resolved(self, activation: Activation, solver: SolverConfig, rows: int, d_in: int) -> "TrainingConfig":
        """The same with every default filled in that depends on the data or the activation; idempotent. Raises
        ConfigError if options contradict each other, or do nothing together."""
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("cannot use both --epochs and --steps at the same time; use one of them")
        if self.batch_size > rows:
            return replace(self, batch_size=rows).resolved(activation, solver, rows, d_in)
        sparsity = self.sparsity or activation.default_sparsity
        activation.check_sparsity(sparsity)
        if sparsity == "none" and self.sparsity_weight:
            raise ConfigError("--sparsity-weight does nothing with --sparsity none; leave it out, or name a penalty "
                              f"({', '.join(name for name in activation.sparsities if name != 'none')})",
                              option="sparsity_weight")
        if sparsity == "none" and self.sparsity_warm_up != PENALTY_WARM_UP:
            raise ConfigError("--sparsity-warm-up does nothing with --sparsity none; leave it out, or name a penalty",
                              option="sparsity_warm_up")
        weight = self.sparsity_weight
        d_sae = self.d_sae or 4 * d_in
        prefixes = None if self.prefixes is None else self._prefixes(d_sae)
        activation.check(d_sae)
        solver.check()
        precision = self._precision(d_in * d_sae)
        epochs = self.epochs or min(MOST_DEFAULT_EPOCHS, math.ceil(DEFAULT_STEPS / self.epoch_batches(rows)))
        return replace(
            self, d_sae=d_sae, prefixes=prefixes, precision=precision, sparsity=sparsity,
            epochs=None if self.steps else epochs,
            smoothing=default_width(rows, d_in, d_sae) if self.smoothing == "auto" else self.smoothing,
            sparsity_weight=activation.default_weight(sparsity, d_in) if weight is None else weight)

    def _prefixes(self, d_sae: int) -> str:
        """The numbers of latents of all prefixes, the last being all; ConfigError if one is larger."""
        numbers = ([math.ceil(d_sae / latents) for latents in AUTO_PREFIXES] if self.prefixes == "auto" else
                   [int(word) for word in self.prefixes.split(",")])
        if max(numbers) > d_sae:
            raise ConfigError(f"--prefixes must be at most --d-sae, {d_sae}, got {max(numbers)}", option="prefixes")
        return ",".join(str(number) for number in sorted({*numbers, d_sae}))

    def _precision(self, weights: int) -> str:
        """The precision of products; ConfigError if it would undo the precision that other options ask for."""
        exact = self.dtype == "float64"
        if self.precision == "auto":
            rounded = not exact and weights >= SMALLEST and multiplies_bf16(device_named(self.device))
            return "bf16" if rounded else "float32"
        if exact and self.precision != "float32":
            raise ConfigError(f"--precision {self.precision} cannot be used with --dtype float64, which asks for more; "
                              "leave it out", option="precision")
        return self.precision

    def batches(self, rows: int) -> int | None:
        """Batches in all of a resolved training; None if it is given in optimiser steps."""
        return None if self.steps else self.epochs * self.epoch_batches(rows)

    def epoch_batches(self, rows: int) -> int:
        """Batches in one pass over the rows."""
        return math.ceil(rows / self.batch_size)


@dataclass(frozen=True)
class Plan:
    """What to train, every setting resolved.

    Args:
        train_rows: the rows to train on.
        test_rows: the rows to measure on after each epoch; None for none.
        training: the settings, resolved.
        solver: the solver and its settings, resolved.
        activation: the activation and its settings.
        start: the SAE to start from; None for random directions.
        held: the weights that keep their start, W_enc or W_dec; None for none. See `solvers.Task`.
    """

    train_rows: AnyRows
    test_rows: AnyRows | None
    training: TrainingConfig
    solver: SolverConfig
    activation: Activation
    start: Start | None = None
    held: str | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """The widths of a crosscoder's places; none if it is none."""
        return self.train_rows.places

    def settings(self) -> dict[str, Any]:
        """All options, by name."""
        start = {} if self.start is None else {"init": self.start.name, "init_hash": self.start.hash}
        return {"solver": self.solver.name, "act": self.activation.name, **start, **self.training.to_json(),
                **self.solver.to_json(), **self.activation.to_json()}

    @classmethod
    def resolved(cls, train_rows: AnyRows, test_rows: AnyRows | None, training: TrainingConfig, solver: SolverConfig,
                 activation: Activation, start: Start | None = None) -> Self:
        """The plan with every default filled in; ConfigError if settings contradict each other, or do nothing
        together."""
        if training.skip and not train_rows.d_target:
            raise ConfigError("--skip does nothing without --target: from rows to themselves it would be all; leave "
                              "it out, or name the store that is predicted", option="skip")
        if train_rows.places and training.sparsity == "kl":
            raise ConfigError(f"--sparsity kl is defined for one place, got {len(train_rows.places)}; use another, "
                              "such as l1", option="sparsity")
        if start is not None:
            training = replace(training, **start.settled(training.d_sae, training.prefixes, training.skip, activation,
                                                         train_rows))
        if isinstance(train_rows, LiveRows) and training.epochs is training.steps is None:
            training = replace(training, epochs=1)
        training = training.resolved(activation, solver, train_rows.rows, train_rows.d_in)
        plan = cls(train_rows, test_rows, training, solver.resolved(training.batches(train_rows.rows)),
                   activation.resolved(training.sparsity, training.d_sae), start)
        if isinstance(train_rows, LiveRows):
            plan._demand_one_pass(train_rows)
        return plan

    def _demand_one_pass(self, rows: LiveRows) -> None:
        """Refuse, by a ConfigError, what takes rows again that have gone."""
        advice = "make a store of them by `sae extract`, and train on that"
        if (self.training.epochs or 1) > 1:
            raise ConfigError(f"--epochs must be 1 with --model, whose rows come once, got {self.training.epochs}; "
                              + advice, option="epochs")
        most = self.training.epoch_batches(rows.rows) * self.solver.inner_steps
        if (self.training.steps or 0) > most:
            raise ConfigError(f"--steps must be at most {most} with --model, whose rows come once, got "
                              f"{self.training.steps}; raise --rows or --inner-steps, or {advice}", option="steps")
        if self.training.precision == "tf32":
            raise ConfigError("--precision tf32 holds for the whole process, also for --model while it gives the "
                              f"rows; use --precision float32, or {advice}", option="precision")
        if rows.ready < rows.rows and (name := self.solver.all_rows_option):
            raise ConfigError(f"{flag_of(name)} takes decoder steps over all rows: expected at most {rows.ready:,} "
                              f"rows with --model, which are kept in memory, got {rows.rows:,}; lower --rows, or "
                              f"{advice}", option=name)

"""The options of the solvers. Imports no torch, so that help pages are fast; methods that need it import it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..base.distributed import ALONE, Communicator
from ..base.errors import ConfigError, flag_of
from ..base.options import PAPER, Config, option
from .config import DEFAULT_STEPS, TrainingConfig

if TYPE_CHECKING:
    from ..sae.codes import Prefixes
    from ..sae.dictionary import SAE
    from ..store.rows import RowSource
    from .task import Task

WINDOW = 16  # batches among which inner steps mix rows
MOST_INNER_STEPS = 10
REVIVAL_ROWS = 2  # rows per latent, from which on they are: with fewer, latents stay idle because rows are few
DECODER_STEPS = 16  # in training, at least, as long as their passes take no more than a fraction of its rows
RELEASE = 0.5  # fraction of all steps after which the decoder may be released
RELEASED_BELOW = 0.3  # alpha over the Gram matrix's mean diagonal, from which up it is held to the end
SPELLING = "a number, FIRST:LAST with both above 0, or numbers of at least 0 with commas between them"


def check_schedule(text: str) -> None:
    """Refuse a text that is no schedule, by a ValueError whose message completes "the option must be"."""
    try:
        values = _values(text)
    except ValueError:
        raise ValueError(SPELLING) from None
    if not all(math.isfinite(value) and (value > 0 or (value == 0 and ":" not in text)) for value in values):
        raise ValueError(SPELLING)


def weight_at(schedule: float | str, outer: int, outers: int) -> float:
    """The weight at outer iteration `outer` of `outers`, by a number or a schedule that passes `check_schedule`."""
    if not isinstance(schedule, str):
        return schedule
    values = _values(schedule)
    if ":" not in schedule:
        return values[min(outer, len(values) - 1)]
    first, last = values
    progress = min(1.0, outer / (outers - 1)) if outers > 1 else 0.0
    return math.exp((1 - progress) * math.log(first) + progress * math.log(last))


def _values(text: str) -> list[float]:
    values = [float(part) for part in text.split(":" if ":" in text else ",")]
    if len(values) < 2 or (":" in text and len(values) != 2):
        raise ValueError(text)
    return values


def proximal(difference: str, more: str) -> Any:
    """Declare a proximal weight: a number or a schedule."""
    return option(0.0, f"Proximal weight of ||{difference}||^2{more}.", minimum=0, check=check_schedule,
                  metavar="FLOAT|FIRST:LAST|A,B,...", **PAPER)


@dataclass(frozen=True)
class SolverConfig(Config, ABC):
    """A solver's options; `build` makes the solver."""

    panel: ClassVar[str] = "Solver"
    name: ClassVar[str]
    made_by: ClassVar[str]  # `module:function` in this package, imported when the solver is built
    memory_advice: ClassVar[str] = "use a smaller --d-sae"

    optimizer: str = option("adam", "What takes the descent steps: adam; sgd, plain gradient steps as in the paper's "
                                    "algorithm, for which --lr must be a number; lbfgs, a solve to tolerance on all "
                                    "rows as one batch, without learning rate, smoothing or warm-up.",
                            choices=("adam", "sgd", "lbfgs"), **PAPER)
    clip_norm: float | None = option(None, "Largest norm of a step's gradient, of the mean loss over a batch; a larger "
                                           "gradient is scaled down to it.", above=0, **PAPER)
    weight_decay: float = option(0.0, "Weight of ||W_enc||^2, with sgd of ||W_dec||^2 too, beside the squared error "
                                      "summed over all rows.", minimum=0, **PAPER)
    mu_enc: float | str = proximal("W_enc - W_enc^t", ", beside the squared error summed over all rows: a number, or a "
                                   "schedule over the outer iterations t (with sgd, epochs), FIRST:LAST (geometric) or "
                                   "A,B,... (one each, then the last)")
    nu_enc: float | str = proximal("b_enc - b_enc^t", ", as --mu-enc")

    inner_steps: int | str = option("auto", f"Optimiser steps per batch. auto: about {DEFAULT_STEPS} in all of "
                                            f"training, at most {MOST_INNER_STEPS} per batch; with --steps, 1.",
                                    choices=("auto",), minimum=1)
    revive: bool = option(True, "Re-aim dead latents, with pam-sgd also those that the others could replace, at the "
                                f"rows reconstructed worst, where there are at least {REVIVAL_ROWS} rows per latent.",
                          advanced=True)

    @property
    def to_tolerance(self) -> bool:
        """Whether one step solves the problem of its batch, which must then stay the same."""
        return self.optimizer == "lbfgs"

    def resolved(self, batches: int | None) -> Self:
        """The same with `inner_steps` a number: little data is no reason for few steps.

        Args:
            batches: the number of batches in all of training; None if training is given in optimiser steps.
        """
        if self.inner_steps != "auto":
            return self
        wanted = round(DEFAULT_STEPS / batches) if batches and not self.to_tolerance else 1
        return replace(self, inner_steps=min(max(wanted, 1), MOST_INNER_STEPS))

    def check(self, training: TrainingConfig, rows: RowSource) -> None:
        """Refuse training settings, or rows, that cannot work with the solver's options, by a ConfigError."""
        from .optimizers import OPTIMIZERS

        OPTIMIZERS[self.optimizer].check(rows.rows, training.batch_size, training.lr, training.smoothing)
        if self.to_tolerance and self.clip_norm is not None:
            raise ConfigError(f"--clip-norm does nothing with --optimizer {self.optimizer}, whose line search finds "
                              "its steps; leave it out, or use --optimizer adam or sgd", option="clip_norm")
        if self.to_tolerance and self.inner_steps not in ("auto", 1):
            raise ConfigError(f"--inner-steps {self.inner_steps} does nothing with --optimizer {self.optimizer}, "
                              "whose one step solves for the encoder to tolerance; leave it out", option="inner_steps")

    def default_smoothing(self, rows: int, d_in: int, d_sae: int) -> float:
        """The width of smoothing when the user gives none: the wider, the more latents there are per row (see
        `smoothing.py`)."""
        from .smoothing import default_width

        return 0.0 if self.to_tolerance else default_width(rows, d_in, d_sae)

    def window(self, rows: int, batch_size: int, d_in: int) -> int:
        """Bytes of the window in which inner steps mix rows: apart, joined, mixed."""
        return 0 if self.inner_steps == 1 else 3 * 4 * min(rows, WINDOW * batch_size) * d_in

    def build(self, initial: SAE, task: Task, communicator: Communicator = ALONE) -> Any:
        """A `Solver` that starts from a copy of `initial`, alone or with the communicator's other processes."""
        module, name = self.made_by.split(":")
        return getattr(import_module(f".{module}", __package__), name)(initial, task, self, communicator)

    @abstractmethod
    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int, prefixes: Prefixes = ()) -> int:
        """The solver's peak memory per process in bytes, without the codes of a batch."""


@dataclass(frozen=True)
class Sgd(SolverConfig):
    """Options of SGD."""

    name: ClassVar[str] = "sgd"
    made_by: ClassVar[str] = "sgd:solver"

    tied: bool = option(False, "Tie the decoder to the encoder: W_dec = W_enc'; with --target W_enc' B, B the "
                              "targets' regression on the rows.", advanced=True)

    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int, prefixes: Prefixes = ()) -> int:
        """Weights, gradients, optimiser state, and for `mu_enc` the encoder's reference, in float32."""
        from .optimizers import OPTIMIZERS

        matrices = (2 + OPTIMIZERS[self.optimizer].vectors) * (1 if self.tied else 2) + bool(self.mu_enc)
        return 4 * matrices * d_in * d_sae + self.window(rows, batch_size, d_in)


@dataclass(frozen=True)
class PamSgd(SolverConfig):
    """Options of PAM-SGD; penalties are in the units of a sum of squared errors over all training rows."""

    name: ClassVar[str] = "pam-sgd"
    made_by: ClassVar[str] = "pam_sgd:PamSgdSolver"
    memory_advice: ClassVar[str] = "use a smaller --d-sae, or --solver sgd, which solves for no decoder"

    decoder: str = option("residual", "Unknown of the decoder step: residual, Delta in W_dec = c W_enc' + Delta; free, "
                                      "W_dec itself, as in the paper.", choices=("residual", "free"), **PAPER)
    alpha: float | str = option("auto", "Ridge of the decoder step, beside the squared error summed over all rows: "
                                        "weight of ||W_dec - c W_enc'||^2, with --decoder free of ||W_dec||^2. auto: "
                                        "the best by leave-one-out.",
                                choices=("auto",), minimum=0)
    beta: float = option(0.0, "Weight of ||b_dec||^2, beside the squared error summed over all rows.", minimum=0,
                         **PAPER)
    bias: str = option("joint", "How the decoder step finds b_dec: joint, together with W_dec; after, as the mean of "
                                "what a W_dec solved without bias leaves, as in the paper's code, for which --alpha "
                                "must be a number.", choices=("joint", "after"), **PAPER)
    mu_dec: float | str = proximal("W_dec - W_dec^t", ", as --mu-enc")
    nu_dec: float | str = proximal("b_dec - b_dec^t", ", as --mu-enc")
    decoder_every: int | str = option("auto", "When to solve for the decoder besides after each epoch: every N "
                                              "batches. auto: where epochs are few, so that it is about "
                                              f"{DECODER_STEPS} times in all. epoch: never.",
                                      choices=("auto", "epoch"), minimum=1, metavar="auto|epoch|N", advanced=True)
    release: float | str = option("auto", "Fraction of the steps after which the decoder descends beside the encoder, "
                                          "untied, and is solved for after each epoch as before. auto: "
                                          f"{RELEASE}, with --decoder residual and if alpha is then below "
                                          f"{RELEASED_BELOW} of the Gram matrix's mean diagonal; of a transcoder 0. 1: "
                                          "never.",
                                  choices=("auto",), minimum=0, maximum=1, advanced=True)
    decoder_first: bool = option(False, "Solve for the decoder before the encoder steps of each epoch, not after them, "
                                        "as in the paper's code for language models.", **PAPER)
    solve: str = option("auto", "How to solve for the decoder: direct, by factorising a d_sae x d_sae matrix in "
                                "float64, slow on consumer GPUs; iterative, without it, to a residual of 1e-4. auto: "
                                "direct where it fits in memory.", choices=("auto", "direct", "iterative"),
                                advanced=True)

    def check(self, training: TrainingConfig, rows: RowSource) -> None:
        super().check(training, rows)
        if rows.ready < rows.rows and (self.decoder_first or takes_all_rows(self)):
            name = "decoder_first" if self.decoder_first else "decoder"
            raise ConfigError(f"{flag_of(name)} needs all rows in memory, at most {rows.ready:,} with --model, got "
                              f"{rows.rows:,}; lower --rows, or make a store by `sae extract`", option=name)
        if self.bias == "after" and self.alpha == "auto":
            raise ConfigError("--bias after cannot be used with --alpha auto, which chooses for the bias that is "
                              "joint with W_dec; give a number, such as --alpha 1, or use --bias joint", option="bias")
        if self.decoder_first and not isinstance(self.decoder_every, str):
            raise ConfigError("--decoder-first cannot be used with --decoder-every, which adds decoder steps after "
                              "encoder steps; use one of them", option="decoder_first")

    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int, prefixes: Prefixes = ()) -> int:
        """The decoder step's memory, solved in the way that takes least, and `beside`."""
        from .ridge import plan

        ways = (self.solve,) if self.solve != "auto" else ("direct", "iterative")
        solving = min(plan(rows, d_sae, d_in, solve=way, prefixes=prefixes).bytes for way in ways)
        return solving + self.beside(rows, batch_size, d_in, d_sae)

    def beside(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """Bytes besides the decoder step's: the sample on which alpha is chosen, the encoder's weights and optimiser,
        and the window in which inner steps mix rows."""
        from .decoder_pass import choosing_bytes
        from .optimizers import OPTIMIZERS

        choosing = choosing_bytes(rows, d_in, d_sae)
        moved = 1 if self.release == 1 else 2  # matrices that have a gradient and an optimiser's state
        weights = 4 * (3 + moved * (1 + OPTIMIZERS[self.optimizer].vectors)) * d_in * d_sae
        return choosing + weights + self.window(rows, batch_size, d_in)


def takes_all_rows(config: PamSgd) -> bool:
    """Whether every decoder step takes all rows, as the paper's theorem wants it: where the decoder is its, or the
    encoder step is solved to tolerance."""
    return config.decoder == "free" or config.to_tolerance

"""The options of the solvers. Imports no torch, so that help pages are fast; methods that need it import it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..base.errors import ConfigError, flag_of
from ..base.options import PAPER, Config, option
from ..base.processes import ALONE, Communicator
from .config import DEFAULT_STEPS, TrainingConfig

if TYPE_CHECKING:
    from ..sae.codes import Prefixes
    from ..sae.dictionary import SAE
    from ..store.rows import RowSource
    from .task import Task

WINDOW = 16  # batches among which inner steps mix rows
MOST_INNER_STEPS = 10
REVIVAL_ROWS = 2  # least rows per latent for revival: with fewer, latents stay idle for lack of rows
DECODER_STEPS = 16  # least number in training, while their passes take no more than a fraction of its rows
RELEASE = 0.5  # fraction of all steps after which the decoder may be released
RELEASED_BELOW = 0.3  # alpha over the mean Gram diagonal, above which the decoder is held to the end
VECTORS = 2  # numbers that the optimiser keeps per trained weight, besides the weight and its gradient


@dataclass(frozen=True)
class SolverConfig(Config, ABC):
    """A solver's options; `build` makes the solver."""

    panel: ClassVar[str] = "Solver"
    name: ClassVar[str]
    made_by: ClassVar[str]  # `module:function` in this package, imported when the solver is built
    memory_advice: ClassVar[str] = "use a smaller --d-sae"

    clip_norm: float | None = option(None, "Clip the gradient of a batch's mean loss to this norm.", above=0, **PAPER)
    weight_decay: float = option(0.0, "Weight of ||W_enc||^2, with sgd of ||W_dec||^2 too, next to the squared error "
                                      "summed over all rows.", minimum=0, **PAPER)
    mu_enc: float = option(0.0, "Proximal weight of ||W_enc - W_enc^t||^2, next to the squared error summed over all "
                                "rows; t counts decoder steps, with sgd epochs.", minimum=0, **PAPER)
    nu_enc: float = option(0.0, "Proximal weight of ||b_enc - b_enc^t||^2, as --mu-enc.", minimum=0, **PAPER)

    inner_steps: int | str = option("auto", f"Optimiser steps per batch. auto: about {DEFAULT_STEPS} in all of "
                                            f"training, at most {MOST_INNER_STEPS} per batch; with --steps, 1.",
                                    choices=("auto",), minimum=1)
    revive: bool = option(True, "Re-aim dead latents, with pam-sgd also those that the others could replace, at the "
                                f"rows reconstructed worst, where there are at least {REVIVAL_ROWS} rows per latent.",
                          advanced=True)

    def resolved(self, batches: int | None) -> Self:
        """The same with `inner_steps` a number: little data is no reason for few steps.

        Args:
            batches: the number of batches in all of training; None if training is given in optimiser steps.
        """
        if self.inner_steps != "auto":
            return self
        wanted = round(DEFAULT_STEPS / batches) if batches else 1
        return replace(self, inner_steps=min(max(wanted, 1), MOST_INNER_STEPS))

    @property
    def rounds(self) -> int:
        """`inner_steps` of resolved options."""
        assert isinstance(self.inner_steps, int)
        return self.inner_steps

    def check(self, training: TrainingConfig, rows: RowSource) -> None:
        """Refuse training settings, or rows, that cannot work with the solver's options, by a ConfigError."""

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
    made_by: ClassVar[str] = "solver:sgd"

    tied: bool = option(False, "Tie the decoder to the encoder: W_dec = W_enc'; with --target W_enc' B, B the "
                              "targets' regression on the rows.", advanced=True)

    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int, prefixes: Prefixes = ()) -> int:
        """Weights, gradients, optimiser state, and for `mu_enc` the encoder's reference, in float32."""
        matrices = (2 + VECTORS) * (1 if self.tied else 2) + bool(self.mu_enc)
        return 4 * matrices * d_in * d_sae + self.window(rows, batch_size, d_in)


@dataclass(frozen=True)
class PamSgd(SolverConfig):
    """Options of PAM-SGD; penalties are in the units of a sum of squared errors over all training rows."""

    name: ClassVar[str] = "pam-sgd"
    made_by: ClassVar[str] = "pam_sgd:PamSgdSolver"
    memory_advice: ClassVar[str] = "use a smaller --d-sae, or --solver sgd, which solves for no decoder"

    decoder: str = option("residual", "Unknown of the decoder step: residual, Delta in W_dec = c W_enc' + Delta; free, "
                                      "W_dec itself, as in the paper.", choices=("residual", "free"), **PAPER)
    alpha: float | str = option("auto", "Ridge of the decoder step: weight of ||W_dec - c W_enc'||^2, with --decoder "
                                        "free of ||W_dec||^2, next to the squared error summed over all rows. auto: "
                                        "the best by leave-one-out.",
                                choices=("auto",), minimum=0)
    beta: float = option(0.0, "Weight of ||b_dec||^2, next to the squared error summed over all rows.", minimum=0,
                         **PAPER)
    bias: str = option("joint", "How the decoder step finds b_dec: joint, together with W_dec; after, as the mean of "
                                "what a W_dec solved without bias leaves, as in the paper's code, for which --alpha "
                                "must be a number.", choices=("joint", "after"), **PAPER)
    mu_dec: float = option(0.0, "Proximal weight of ||W_dec - W_dec^t||^2, as --mu-enc.", minimum=0, **PAPER)
    nu_dec: float = option(0.0, "Proximal weight of ||b_dec - b_dec^t||^2, as --mu-enc.", minimum=0, **PAPER)
    decoder_every: int | str = option("auto", "Extra decoder steps: one every N batches, besides one after each epoch. "
                                              f"auto: about {DECODER_STEPS} in all. epoch: none.",
                                      choices=("auto", "epoch"), minimum=1, metavar="auto|epoch|N", advanced=True)
    release: float | str = option("auto", "Fraction of steps after which W_dec is also trained by gradient. auto: "
                                          f"{RELEASE} with --decoder residual if alpha is then below "
                                          f"{RELEASED_BELOW} of the mean Gram diagonal, else never; 0 for transcoders. "
                                          "1: never.",
                                  choices=("auto",), minimum=0, maximum=1, advanced=True)
    decoder_first: bool = option(False, "Solve for the decoder before the encoder steps of each epoch, not after them, "
                                        "as in the paper's code for language models.", **PAPER)
    solve: str = option("auto", "How to solve for the decoder: direct, by factorising a d_sae x d_sae matrix in "
                                "float64, slow on consumer GPUs; iterative, without it, to a residual of 1e-4. auto: "
                                "direct where it fits in memory.", choices=("auto", "direct", "iterative"),
                                advanced=True)

    def check(self, training: TrainingConfig, rows: RowSource) -> None:
        if rows.ready < rows.rows and self.takes_all_rows:
            name = "decoder_first" if self.decoder_first else "decoder"
            raise ConfigError(f"{flag_of(name)} needs all rows in memory, at most {rows.ready:,} with --model, got "
                              f"{rows.rows:,}; lower --rows, or make a store by `sae extract`", option=name)
        if self.bias == "after" and self.alpha == "auto":
            raise ConfigError("--bias after cannot be used with --alpha auto, which chooses for the bias that is "
                              "joint with W_dec; give a number, such as --alpha 1, or use --bias joint", option="bias")
        if self.decoder_first and not isinstance(self.decoder_every, str):
            raise ConfigError("--decoder-first cannot be used with --decoder-every, which adds decoder steps after "
                              "encoder steps; use one of them", option="decoder_first")

    @property
    def takes_all_rows(self) -> bool:
        """Whether every decoder step takes all rows, as the paper's do."""
        return self.decoder_first or self.decoder == "free"

    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int, prefixes: Prefixes = ()) -> int:
        """The decoder step's memory, solved in the way that takes least, and `other_bytes`."""
        from .ridge import plan

        ways = (self.solve,) if self.solve != "auto" else ("direct", "iterative")
        solving = min(plan(rows, d_sae, d_in, solve=way, prefixes=prefixes).bytes for way in ways)
        return solving + self.other_bytes(rows, batch_size, d_in, d_sae)

    def other_bytes(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """Bytes besides the decoder step's: the sample on which alpha is chosen, the encoder's weights and optimiser,
        and the window in which inner steps mix rows."""
        from .decoder_step import sampled_bytes

        moved = 1 if self.release == 1 else 2  # matrices that have a gradient and an optimiser's state
        weights = 4 * (3 + moved * (1 + VECTORS)) * d_in * d_sae
        return sampled_bytes(rows, d_in, d_sae) + weights + self.window(rows, batch_size, d_in)

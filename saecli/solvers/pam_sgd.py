"""PAM-SGD: SGD on the encoder alternates with the decoder's closed-form optimum.

Source: the paper's Algorithm 3.1. One outer iteration t is a pass of encoder steps, on

    sum ||x_hat - x||^2 + penalty + mu_enc ||W_enc - W_enc^t||_F^2 + nu_enc ||b_enc - b_enc^t||^2

(no term has a 1/2), and then the decoder step of `saecli/ridge`, with proximal weights mu_dec and nu_dec. All four
may follow schedules in t.

The paper's decoder, `free`, is the unknown W_dec itself. The default, `residual`, has the unknown Delta in
`W_dec = c W_enc' + Delta`: the decoder step solves for Delta, c and b_dec with the ridge alpha on Delta, and the
encoder step holds them fixed and differentiates through c W_enc'. As alpha grows it tends to SGD with tied
weights, as alpha falls to the free decoder.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..config import PAPER, option
from ..distributed import latents_axis
from ..errors import ConfigError
from ..ridge import iterative_memory, memory_needed, shared_memory
from ..sae import SAE
from .alternation import REVIVAL_ROWS, WINDOW, PamSgdSolver
from .base import DEFAULT_STEPS, SolverConfig, Task, proximal
from .gather import BLOCK_ROWS, SAMPLED_ROWS
from .optimizers import OPTIMIZERS
from .smoothing import default_width

MOST_INNER_STEPS = 10
CODES_SHARE = 0.8  # of the memory that is left, for codes that an iteration keeps


@dataclass(frozen=True)
class PamSgd(SolverConfig):
    """Options of PAM-SGD; penalties are in the units of a sum of squared errors over all training rows."""

    name: ClassVar[str] = "pam-sgd"
    memory_advice: ClassVar[str] = "use a smaller {d_sae}, or {solver} sgd, which solves for no decoder"

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
    inner_steps: int | str = option("auto", f"Encoder steps per batch. auto: about {DEFAULT_STEPS} in all of training, "
                                            f"at most {MOST_INNER_STEPS} per batch; with --steps, 1.",
                                    choices=("auto",), minimum=1)
    decoder_every: int | str = option("epoch", "When to solve for the decoder. epoch: after each epoch, by a pass over "
                                               "all rows. N: also every N batches, from recent codes.",
                                      choices=("epoch",), minimum=1, metavar="epoch|N")
    decoder_first: bool = option(False, "Solve for the decoder before the encoder steps of each epoch, not after them, "
                                        "as in the paper's code for language models.", **PAPER)
    solve: str = option("auto", "How to solve for the decoder: direct, by factorising a d_sae x d_sae matrix; "
                                "iterative, without that matrix, to a residual of 1e-4. auto: direct where the matrix "
                                "fits in memory.", choices=("auto", "direct", "iterative"), advanced=True)
    revive: bool = option(True, "Re-aim dead latents at the rows reconstructed worst, where there are at least "
                                f"{REVIVAL_ROWS} rows per latent.", advanced=True)

    @property
    def steps_per_batch(self) -> int:
        """Encoder steps on each batch."""
        return self.inner_steps

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The resolved configuration that `to_json` wrote; see `Config.from_json`."""
        return super().from_json({"inner_steps": 1} | document)  # as it was before there was a choice

    def resolved(self, batches: int | None) -> "PamSgd":
        """The same with `inner_steps` a number: little data is no reason for few steps."""
        if self.inner_steps != "auto":
            return self
        if OPTIMIZERS[self.optimizer].to_tolerance:
            return replace(self, inner_steps=1)
        wanted = round(DEFAULT_STEPS / batches) if batches else 1
        return replace(self, inner_steps=min(max(wanted, 1), MOST_INNER_STEPS))

    def check(self, rows: int, batch_size: int, lr: float | str, smoothing: float | str) -> None:
        """Refuse settings of training that cannot work with the optimiser, and steps that do nothing with it.

        Raises:
            ConfigError: there are such.
        """
        super().check(rows, batch_size, lr, smoothing)
        if OPTIMIZERS[self.optimizer].to_tolerance and self.inner_steps not in ("auto", 1):
            raise ConfigError("inner_steps", "{given} does nothing with {optimizer} {name}, whose one step solves for "
                                             "the encoder to tolerance", "leave it out", given=self.inner_steps,
                              name=self.optimizer)
        if self.bias == "after" and self.alpha == "auto":
            raise ConfigError("bias", "after cannot be used with {alpha} auto, which chooses for the bias that is "
                                      "joint with W_dec", "give a number, such as {alpha} 1, or use {bias} joint")
        if self.decoder_first and self.decoder_every != "epoch":
            raise ConfigError("decoder_first", "cannot be used with {decoder_every}, which adds decoder steps after "
                                               "encoder steps", "use one of them")

    def check_shared_latents(self) -> None:
        """Refuse options that cannot work where several processes hold the latents together.

        Raises:
            ConfigError: there are such.
        """
        super().check_shared_latents()
        if self.solve == "iterative":
            raise ConfigError("solve", "iterative cannot be used with {latent_shards}, which spreads the d_sae x d_sae "
                                       "matrix over processes", "leave one of them out")

    def default_smoothing(self, rows: int, d_in: int, d_sae: int) -> float:
        """The more latents there are for each row, the more (see `smoothing.py`)."""
        return 0.0 if OPTIMIZERS[self.optimizer].to_tolerance else default_width(rows, d_in, d_sae)

    def build(self, initial: SAE, task: Task) -> "PamSgdSolver":
        """A solver that starts from `initial`."""
        return PamSgdSolver(initial, task, self)

    def memory(self, rows: int, batch_size: int, d_in: int, d_sae: int) -> int:
        """The decoder step's, that of the sample on which alpha is chosen, that of the encoder's weights and optimiser,
        and the window in which inner steps mix rows."""
        sample = min(rows, SAMPLED_ROWS)
        places = latents_axis().size
        choosing = 4 * 4 * sample * (d_sae // places + d_in)
        weights = 4 * (4 + OPTIMIZERS[self.optimizer].vectors) * d_in * d_sae // places
        window = 0 if self.inner_steps == 1 else 3 * 4 * min(rows, WINDOW * batch_size) * d_in  # apart, joined, mixed
        if places > 1:
            return shared_memory(d_in, d_sae, max(batch_size, BLOCK_ROWS)) + choosing + weights + window
        ways = {"direct": memory_needed(rows, d_in, d_sae), "iterative": iterative_memory(d_in, d_sae, streams=True)}
        return ways.get(self.solve, min(ways.values())) + choosing + weights + window

    def budget(self, task: Task, d_in: int, d_sae: int) -> float | None:
        """Bytes that codes may take where the decoder step is solved by iteration; None where it is solved directly."""
        sizes = task.rows, math.ceil(task.rows / task.batches), d_in, d_sae
        if self.solve == "direct" or latents_axis().size > 1 or (
                self.solve == "auto" and replace(self, solve="direct").memory(*sizes) <= task.memory):
            return None
        least = replace(self, solve="iterative").memory(*sizes)
        saved = iterative_memory(d_in, d_sae, streams=True) - iterative_memory(d_in, d_sae, streams=False)
        return CODES_SHARE * max(task.memory - least + saved, 0)

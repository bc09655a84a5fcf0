"""The start of a training: random directions or an SAE, and the learning rate.

Shapes: n rows, B rows of a batch, D = d_in, E = d_out, F = d_sae.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..base.console import Listener
from ..base.errors import ConfigError, RunError
from ..base.files import to_json
from ..base.home import Home
from ..sae.activations import PENALTY_OPTIONS, Activation, LearnsThresholds, activation_to_json
from ..sae.dictionary import SAE, Batch
from ..sae.library import hook_points, lasting_name, open_sae
from ..store.joined import Joined
from ..store.reader import RowSource
from .options import TrainingConfig
from .rows import SAMPLED_ROWS, Normalisation

RATE_FACTOR, RATE_POWER = 0.105, 1 / 3
HIGHEST_RATE, OF_WIDTH = 0.008, 128
ENOUGH_FIRINGS, FIRINGS_POWER = 8, 2 / 3
POWER_ITERATIONS = 30  # for two digits of an eigenvalue


def initial_sae(
    activation: Activation,
    d_sae: int,
    batch: Batch,
    seed: int,
    B: Tensor | None = None,
    sparsity: str = "none",
) -> SAE:
    """An SAE with random unit directions, `W_dec = W_enc' B`, its scale fitted to a batch of normalised rows. B,
    (D, E), is the targets' regression on them, None if the targets are the rows.

    If the activation is linear on pairs of opposites and there are two latents per dimension, half of the directions
    are opposites of the others: the SAE can then be linear from the start (without a penalty, test FVU after 50 passes
    over 700 rows of tiny-gemma2: 1e-7 instead of 1e-3).
    """
    x, d_in = batch.x, batch.x.shape[1]
    directions = torch.randn(
        d_in, d_sae, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    if activation.opposites and d_sae >= 2 * d_in:
        half = d_sae // 2
        directions[:, half : 2 * half] = -directions[:, :half]
    W_enc = (directions / directions.norm(dim=0)).to(x)
    penalty = activation.penalty(sparsity)
    start = activation.parameters(d_sae) | penalty.initial(d_sae)
    parameters = penalty.fitted(x @ W_enc, {name: tensor.to(x) for name, tensor in start.items()})
    codes = activation.training_codes(x @ W_enc, parameters | {"W_enc": W_enc})
    y_hat = codes.times(W_enc.T if B is None else W_enc.T @ B)
    size = y_hat.square().sum()
    fit = ((batch.y * y_hat).sum() / size).clamp(min=1e-3) if size > 0 else x.new_ones(())
    W_enc = W_enc * fit.sqrt()
    parameters = penalty.fitted(x @ W_enc, parameters)
    W_dec, d_out = W_enc.T if B is None else W_enc.T @ B, batch.y.shape[1]
    return SAE(
        W_enc, x.new_zeros(d_sae), W_dec.contiguous(), x.new_zeros(d_out), activation, parameters
    )


def shaped(sae: SAE, training: TrainingConfig, widths: Sequence[int]) -> SAE:
    """The SAE nested and with an affine skip, 0 if new, as the settings ask; `widths` of a crosscoder's hook points."""
    skip = (
        sae.W_enc.new_zeros(sae.d_in, sae.d_out)
        if training.skip and sae.W_skip is None
        else sae.W_skip
    )
    return SAE(
        sae.W_enc,
        sae.b_enc,
        sae.W_dec,
        sae.b_dec,
        sae.activation,
        sae.activation_parameters,
        prefixes=training.nested,
        W_skip=skip,
        widths=tuple(widths),
    )


def fitted_learning_rate(batch: Tensor, firings: float) -> float:
    """Peak learning rate of Adam.

        lr = min(0.008 sqrt(128 / D), 0.105 / (D lambda)^(1/3)) * min(1, firings / 8)^(2/3)

    lambda is the largest eigenvalue of `sum ||x||^2 x x' / sum ||x||^2` for rows of mean squared norm D. A step of Adam
    moves a latent, of norm about 1, by up to `lr sqrt(D)`, and the pre-activations of rows along the leading direction
    by up to `lr sqrt(D lambda)`; the fourth moment weights the rows of large norm, which dominate the gradient. A
    latent's steps are noisier if it fires on few rows per batch: `firings`, above 0.

    Powers and factors are fitted to the best rates of 4,000 steps: 8e-3 on tiny-gemma2 (D = 128) at 8 firings, 4e-3
    there at 2, 4e-3 to 8e-3 on image patches (256), about 4e-3 in two worlds at 2.5 (128) and 3.8 (192).

    Source: Gao et al., "Scaling and evaluating sparse autoencoders" (2024), whose rate falls as 1/sqrt(d_sae).
    """
    most = HIGHEST_RATE * math.sqrt(OF_WIDTH / batch.shape[1])
    rarity = min(1.0, firings / ENOUGH_FIRINGS) ** FIRINGS_POWER
    x = batch.double()
    square = x.square().sum(1)
    direction, length = x[square.argmax()], square.max().sqrt()
    if not length > 0:
        return most * rarity
    for _ in range(POWER_ITERATIONS):
        direction = x.T @ (square * (x @ (direction / length))) / square.sum()
        length = direction.norm()
    spread = (length / square.mean()).item()  # lambda / D, whatever the rows' scale
    return min(most, RATE_FACTOR / (x.shape[1] ** 2 * spread) ** RATE_POWER) * rarity


@dataclass(frozen=True, eq=False)
class Start:
    """The SAE that a training starts from."""

    name: str  # or path, or address
    hash: str  # its `fingerprint`
    sae: SAE | None  # acting on raw rows; None if training resumes from a checkpoint
    inputs: tuple[str, ...] = ()  # its hook points, in words, if known

    @classmethod
    def open(cls, home: Home, sae: SAE | str | Path, listener: Listener) -> Self:
        """A start from an SAE, a run's name or anything else that `load_sae` takes."""
        subject, saved = open_sae(home, sae, listener)
        inputs, _ = hook_points(saved.origin)
        return cls(
            lasting_name(home, sae, subject), fingerprint(saved.sae), saved.sae, tuple(inputs)
        )

    @property
    def activation(self) -> str:
        return self._sae.activation.name

    @property
    def _sae(self) -> SAE:
        assert self.sae is not None, "a training that resumes from a checkpoint has no start"
        return self.sae

    def again(self, home: Home, listener: Listener) -> Self:
        """The same with its SAE, opened again; RunError if that has changed."""
        found = Start.open(home, self.name, listener)
        if found.hash != self.hash:
            raise RunError(
                f"{self.name} is not the SAE that this run was begun from, though it has its name; train "
                "anew"
            )
        return replace(self, sae=found.sae)

    def settings(self, act: str, given: Collection[str]) -> dict[str, Any]:
        """The settings, such as `k`, of an activation that has the SAE's name, and its penalty unless something of one
        is given; none for another."""
        own, known = self._sae.activation, self._sae.metadata
        if own.name != act:
            return {}
        settings = {name: getattr(own, name) for name in own.of_codes}
        if {"sparsity", *PENALTY_OPTIONS}.isdisjoint(given):
            settings |= {
                name: known[name]
                for name in ("sparsity", "sparsity_weight", *PENALTY_OPTIONS)
                if known.get(name) is not None
            }
        return settings

    def settled(
        self, training: TrainingConfig, activation: Activation, rows: RowSource
    ) -> tuple[TrainingConfig, Activation]:
        """The settings, with what they leave open inherited from the SAE: `d_sae`, `prefixes`, `skip`, and as a target
        its L0 on these rows; smoothing and the penalty's rise are for random directions. ConfigError if the SAE does
        not fit the rows or the settings."""
        sae = self._sae
        for what, wanted, got in (
            ("rows", sae.d_in, rows.d_in),
            ("targets", sae.d_out, rows.d_target or rows.d_in),
        ):
            if wanted != got:
                raise ConfigError(
                    f"--init {self.name} cannot be trained on these rows: expected {what} of {wanted} "
                    f"dimensions, got {got}; use other rows, or another SAE"
                )
        got_inputs = hook_points(Joined.of(rows).origin)[0] if rows.inputs else []
        if [*self.inputs] != got_inputs and sorted(self.inputs) == sorted(got_inputs):
            raise ConfigError(
                f"--data names the inputs of --init {self.name} in another order than it was trained on; "
                f"name them in this order: {', '.join(self.inputs)}"
            )
        if sae.W_skip is not None and not rows.d_target:
            raise ConfigError(
                f"--init {self.name} is a transcoder: expected the store of what it predicts, got none; "
                "name it with --target"
            )
        if training.d_sae not in (None, sae.d_sae):
            raise ConfigError(
                f"--d-sae must be {sae.d_sae}, as in --init {self.name}, got {training.d_sae}; leave it "
                "out"
            )
        prefixes = training.prefixes or ",".join(map(str, sae.prefixes)) or None
        rise, smoothing, sparsity = (
            training.sparsity_warm_up,
            training.smoothing,
            training.sparsity or activation.default_sparsity,
        )
        training = replace(
            training,
            d_sae=sae.d_sae,
            prefixes=prefixes,
            skip=training.skip or sae.W_skip is not None,
            sparsity_warm_up=0.0 if rise is None and sparsity != "none" else rise,
            smoothing=0.0 if smoothing == "auto" else smoothing,
        )
        if (
            isinstance(activation, LearnsThresholds)
            and self._has_parameters(activation)
            and sparsity == "target-l0"
            and activation.target_l0 is None
        ):
            some = torch.from_numpy(
                next(rows.batches(SAMPLED_ROWS, seed=training.shuffle_seed, epoch=0))
            )
            l0 = sae.codes(some[:, : sae.d_in].to(sae.W_enc)).count().item() / len(some)
            activation = replace(activation, target_l0=max(float(f"{l0:.3g}"), 1.0))
        return training, activation

    def initial(
        self,
        activation: Activation,
        sample: Tensor,
        normalisation: Normalisation,
        sparsity: str = "none",
    ) -> SAE:
        """The SAE acting on normalised rows, at the start of training.

        An activation of another kind than the SAE's has parameters fitted to the sample, (n, D). Codes are
        scaled to give encoder and decoder one norm, since Adam's steps are of one size for both.
        """
        mean, scale, target_mean, target_scale = (part.double() for part in normalisation.of_sae())
        own = self._sae.copy_to(torch.float64).copy_to(sample.device)
        # Raw rows are normalised ones, normalised by these.
        own = own.on_raw_rows(
            -mean / scale, 1 / scale, -target_mean / target_scale, 1 / target_scale
        )
        factor = (own.W_dec.norm() / own.W_enc.norm()).sqrt().item()
        own = rescaled(own, factor)
        penalty = activation.penalty(sparsity)
        start = activation.parameters(own.d_sae) | penalty.initial(own.d_sae)
        x = sample.double()
        parameters = penalty.continuing(
            {name: tensor.to(own.W_enc) for name, tensor in start.items()},
            own.codes(x).count().item() / len(x),
        )
        if self._has_parameters(activation):
            parameters |= own.activation_parameters
        else:
            pre = own.pre_activations(x)
            positive = (pre > 0).sum().item() / len(
                pre
            )  # per row, the most that thresholds from 0 can keep
            target = activation.target_l0 if isinstance(activation, LearnsThresholds) else None
            if target is not None and positive < target:
                raise ConfigError(
                    f"--target-l0 must be at most {positive:.1f}, the positive pre-activations per row "
                    f"of --init {self.name}, got {target:g}; lower it, or use another --act"
                )
            parameters = penalty.fitted(pre, parameters)
        return SAE(
            own.W_enc, own.b_enc, own.W_dec, own.b_dec, activation, parameters, W_skip=own.W_skip
        ).copy_to(sample.dtype)

    def _has_parameters(self, activation: Activation) -> bool:
        return type(activation) is type(self._sae.activation)


def rescaled(sae: SAE, factor: float) -> SAE:
    """The same SAE with all codes times a factor, if it is positive and finite."""
    if not 0 < factor < math.inf:
        return sae
    return sae.changed(
        None,
        W_enc=sae.W_enc * factor,
        b_enc=sae.b_enc * factor,
        W_dec=sae.W_dec / factor,
        **sae.activation.rescaled(sae.activation_parameters, factor),
    )


def fingerprint(sae: SAE) -> str:
    """SHA-256 of an SAE's tensors, activation and prefixes, in hexadecimal."""
    digest = hashlib.sha256(to_json([activation_to_json(sae.activation), sae.prefixes]).encode())
    for name, tensor in sorted(sae.tensors().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        )  # NumPy has no bfloat16
    return digest.hexdigest()

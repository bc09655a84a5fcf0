"""The start of a training, random directions or an SAE; and with an SAE, its comparison with the end.

n rows, D = d_in, E = d_out, F = d_sae.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..base.console import Listener
from ..base.devices import moved
from ..base.errors import ConfigError, RunError
from ..base.files import to_json
from ..base.home import Home
from ..base.processes import Communicator
from ..base.words import number
from ..model.saes import open_sae
from ..sae.activations import Activation, LearnsThresholds, activation_to_json
from ..sae.dictionary import SAE, Batch, Dictionary, Normalisation
from ..sae.library import lasting_name
from ..sae.metrics import reconstructions
from ..store.opening import Joined
from ..store.reader import RowSource
from .options import DEFAULT_STEPS, TrainingConfig
from .rows import SAMPLED_ROWS, on_raw_rows, raw_batches

HIGHEST_RATE = 0.005 * math.sqrt(128)  # times sqrt(D)
ENOUGH_FIRINGS = 4  # per batch
NEAR_TARGET = 0.05  # relative distance of an SAE's L0 from a target that it has


def initial_sae(
    activation: Activation,
    d_sae: int,
    batch: Batch,
    seed: int,
    B: Tensor | None = None,
    sparsity: str = "none",
) -> SAE:
    """Random unit directions, `W_dec = W_enc' B`, the scale fitted to a batch; B as in `Task`."""
    x, d_in = batch.x, batch.x.shape[1]
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(d_in, d_sae, generator=generator, dtype=torch.float64)
    W_enc = (directions / directions.norm(dim=0)).to(x)
    penalty = activation.penalty(sparsity)
    start = activation.parameters(d_sae) | penalty.initial(d_sae)
    parameters = penalty.fitted(x @ W_enc, {name: tensor.to(x) for name, tensor in start.items()})
    codes = activation.training_codes(x @ W_enc, parameters | {"W_enc": W_enc})
    y_hat = codes.times(_decoder_of(W_enc, B))
    fit = (batch.y * y_hat).sum() / y_hat.square().sum()
    if fit > 0:  # else no code fires
        W_enc = W_enc * fit.sqrt()
    W_dec, parameters = _decoder_of(W_enc, B), penalty.fitted(x @ W_enc, parameters)
    b_enc, b_dec = x.new_zeros(d_sae), x.new_zeros(batch.y.shape[1])
    return SAE(W_enc, b_enc, W_dec, b_dec, activation, parameters)


def _decoder_of(W_enc: Tensor, B: Tensor | None) -> Tensor:
    return W_enc.T.contiguous() if B is None else W_enc.T @ B


def shaped(sae: SAE, training: TrainingConfig, widths: Sequence[int]) -> SAE:
    """The SAE nested and with an affine skip, 0 if new, as the settings ask; `widths` are a crosscoder's."""
    skip = {}
    if training.skip and sae.W_skip is None:
        skip = {"W_skip": sae.W_enc.new_zeros(sae.d_in, sae.d_out)}
    shaped = sae.changed(None, **skip)
    shaped.prefixes, shaped.widths = tuple(training.nested), tuple(widths)
    return shaped


def default_learning_rate(
    d_in: int, firings: float, steps: int = DEFAULT_STEPS, descending: int = 2
) -> float:
    """Peak learning rate of Adam, for rows of mean squared norm D and latents of `firings` > 0 per batch.

        lr = 0.057 / sqrt(D) * min(1, firings / 4)^(s^2 / 6) * max(1, min(2^(1 / s), (4000 / steps)^(1/3)))

    where s is the number of weight matrices that descend: 2, or 1 where the decoder is solved for. A step moves a
    latent, of norm about 1, by up to `lr sqrt(D)`, and is noisier if it fires on few rows per batch.

    Range: 200 to 4,000 steps, 0.8 to 8 firings (tests/benchmarks/README.md). A factor for the rows' spread made the
    rate 4 to 8 times too low on Gemma.

    Source: Gao et al., "Scaling and evaluating sparse autoencoders" (2024), whose rate falls as 1/sqrt(d_sae).
    """
    noise = min(1.0, firings / ENOUGH_FIRINGS) ** (descending**2 / 6)
    haste = max(1.0, min(2 ** (1 / descending), (DEFAULT_STEPS / steps) ** (1 / 3)))
    return HIGHEST_RATE / math.sqrt(d_in) * noise * haste


@dataclass(frozen=True, eq=False)
class Start:
    name: str  # or path, or address
    hash: str  # its `fingerprint`
    sae: SAE | None  # acting on raw rows; None if training resumes from a checkpoint
    inputs: tuple[str, ...] = ()  # its hook points, in words, if known

    @classmethod
    def open(cls, home: Home, sae: SAE | str | Path, listener: Listener) -> Self:
        """From an SAE, a run's name or anything else that `load_sae` takes."""
        subject, saved = open_sae(home, sae, listener)
        name, (inputs, _) = lasting_name(home, sae, subject), saved.origin.hook_points()
        return cls(name, fingerprint(saved.sae), saved.sae, tuple(inputs))

    @property
    def activation(self) -> str:
        return self._sae.activation.name

    @property
    def _sae(self) -> SAE:
        assert self.sae is not None, "a training that resumes from a checkpoint has no start"
        return self.sae

    @property
    def reads(self) -> np.ndarray | None:
        """The `fit_normalisation` weights, (D + E,), of the SAE's metric; None if that is unknown."""
        scale = None if self.sae is None else self.sae.scale
        return None if scale is None else scale.double().pow(-2).cpu().numpy()

    def reopened(self, home: Home, listener: Listener) -> Self:
        """The same with its SAE; RunError if that has changed."""
        start = Start.open(home, self.name, listener)
        if start.hash != self.hash:
            raise RunError(
                f"{self.name} is not the SAE that this run was begun from, though it has its name; train anew"
            )
        return replace(self, sae=start.sae)

    def settings(self, act: str, given: Collection[str]) -> dict[str, Any]:
        """`d_sae`, and what the SAE's own activation inherits, such as `k`, and its penalty unless one is given."""
        activation, metadata = self._sae.activation, self._sae.metadata
        settings: dict[str, Any] = {"d_sae": self._sae.d_sae}
        if activation.name != act:
            return settings
        settings |= {name: getattr(activation, name) for name in activation.of_codes}
        if not {"sparsity", "target_l0"} & set(given):
            names = ("sparsity", "sparsity_weight", "target_l0")
            settings |= {name: metadata[name] for name in names if metadata.get(name) is not None}
        return settings

    def inherit(
        self, training: TrainingConfig, activation: Activation, rows: RowSource
    ) -> tuple[TrainingConfig, Activation]:
        """Settings with `d_sae`, `prefixes`, `skip`, and as a target the L0 on these rows, inherited where open; no
        smoothing, no rise of the penalty. ConfigError if the SAE does not fit rows or settings."""
        self._demand_fit(training, rows)
        sae, rise = self._sae, training.sparsity_warm_up
        sparsity = training.sparsity or activation.default_sparsity
        training = replace(
            training,
            d_sae=sae.d_sae,
            prefixes=training.prefixes or ",".join(map(str, sae.prefixes)) or None,
            skip=training.skip or sae.W_skip is not None,
            sparsity_warm_up=0.0 if rise is None and sparsity != "none" else rise,
            smoothing=0.0 if training.smoothing == "auto" else training.smoothing,
        )
        aims = sparsity == "target-l0" and self._is_like(activation)
        if aims and isinstance(activation, LearnsThresholds) and activation.target_l0 is None:
            with closing(
                rows.batches(SAMPLED_ROWS, seed=training.shuffle_seed, epoch=0)
            ) as batches:
                x = torch.from_numpy(next(batches))[:, : sae.d_in].to(sae.W_enc)
            l0 = sae.codes(x).count().item() / len(x)
            activation = replace(activation, target_l0=max(float(f"{l0:.3g}"), 1.0))
        return training, activation

    def _demand_fit(self, training: TrainingConfig, rows: RowSource) -> None:
        sae, name = self._sae, f"--init {self.name}"
        widths = ("rows", sae.d_in, rows.d_in), ("targets", sae.d_out, rows.d_target or rows.d_in)
        for what, wanted, got in widths:
            if wanted != got:
                raise ConfigError(
                    f"{name} cannot be trained on these rows: expected {what} of {wanted} dimensions, got {got}; use "
                    "other rows, or another SAE"
                )
        inputs = Joined.of(rows).origin.hook_points()[0] if rows.inputs else []
        if [*self.inputs] != inputs and sorted(self.inputs) == sorted(inputs):
            raise ConfigError(
                f"--data has the inputs of {name} in another order; name them in this order: {', '.join(self.inputs)}"
            )
        if sae.W_skip is not None and not rows.d_target:
            raise ConfigError(
                f"{name} is a transcoder: expected a store of targets, got none; name it with --target"
            )
        if training.d_sae not in (None, sae.d_sae):
            raise ConfigError(
                f"--d-sae must be {sae.d_sae}, as in {name}, got {training.d_sae}; leave it out"
            )

    def initial(
        self,
        activation: Activation,
        sample: Tensor,
        normalisation: Normalisation,
        sparsity: str = "none",
    ) -> SAE:
        """The SAE on normalised rows; an activation of another kind has parameters fitted to the sample, (n, D).

        Codes are scaled to give encoder and decoder one norm, since Adam's steps are of one size for both.
        """
        sae = self._sae.copy_to(torch.float64, sample.device)
        sae = sae.on_raw_rows(normalisation.to(torch.float64).inverse())
        sae = rescaled(sae, (sae.W_dec.norm() / sae.W_enc.norm()).sqrt().item())
        penalty, x = activation.penalty(sparsity), sample.double()
        parameters = activation.parameters(sae.d_sae) | penalty.initial(sae.d_sae)
        parameters = {name: tensor.to(sae.W_enc) for name, tensor in parameters.items()}
        parameters = penalty.continuing(parameters, sae.codes(x).count().item() / len(x))
        if self._is_like(activation):
            parameters |= sae.activation_parameters
        else:
            parameters = penalty.fitted(sae.pre_activations(x), parameters)
        initial = SAE(
            sae.W_enc, sae.b_enc, sae.W_dec, sae.b_dec, activation, parameters, W_skip=sae.W_skip
        )
        if normalisation.kept is not None:
            initial.scale = sae.scale
        return initial.copy_to(sample.dtype)

    def has_codes_of(self, activation: Activation, l0: float) -> bool:
        """Whether the SAE's codes, of this L0, are the activation's without new parameters."""
        own, target = self._sae.activation, getattr(activation, "target_l0", None)
        if not self._is_like(activation) or abs(l0 - (target or l0)) > NEAR_TARGET * l0:
            return False
        return all(getattr(own, name) == getattr(activation, name) for name in own.of_codes)

    def _is_like(self, activation: Activation) -> bool:
        return type(activation) is type(self._sae.activation)


def rescaled(sae: SAE, factor: float) -> SAE:
    """The SAE with all codes times a factor, if it is positive and finite."""
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
    """SHA-256 of tensors, activation and prefixes, in hexadecimal."""
    digest = hashlib.sha256(to_json([activation_to_json(sae.activation), sae.prefixes]).encode())
    for name, tensor in sorted(sae.tensors().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # As bytes, since NumPy has no bfloat16.
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(eq=False)
class Comparison:
    """The SAE before training against the one after; the one of less loss is kept."""

    before: SAE  # on normalised rows, its codes times `factor`
    factor: float
    normalisation: Normalisation
    scale: Tensor | None  # of the metric of the SAE before
    measures: dict[str, Any] = field(default_factory=dict)  # before, after, and which is kept

    @classmethod
    def of(
        cls, start: Start, initial: SAE, normalisation: Normalisation, state: Mapping[str, Tensor]
    ) -> Self:
        """With `initial`, or on resuming with the checkpoint's SAE from before training."""
        factor, scale = 1.0, None if start.sae is None else start.sae.scale
        if state:
            scale = state.get("start.scale")
            factor = float(state.get("start.factor", 1.0))
            tensors = initial.tensors().items()
            kept = {name: state[f"start.{name}"].to(own) for name, own in tensors}
            initial = initial.changed(None, **kept)
        elif start.sae is not None:
            norm = start.sae.W_enc.to(initial.W_enc).norm()
            factor = (on_raw_rows(initial, normalisation).W_enc.norm() / norm).item()
        return cls(initial, factor, normalisation, scale)

    def choose(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Given the measures of both, with their `loss`."""
        kept = "after" if after["loss"] <= before["loss"] else "before"
        self.measures = {"before": before, "after": after, "kept": kept}

    def notes(self) -> list[str]:
        if not self.keeps_before:
            return []
        before, after = (number(self.measures[name]["loss"]) for name in ("before", "after"))
        return [
            f"training did not lower the loss, {before} to {after}: the SAE's weights are kept as they were; train on "
            "more rows, or with a lower --lr"
        ]

    @property
    def keeps_before(self) -> bool:
        return self.measures.get("kept") == "before"

    def sae(self, dictionary: Dictionary) -> SAE:
        """The SAE kept, on raw rows."""
        if not self.keeps_before:
            return self._on_raw_rows(dictionary)
        before = self._on_raw_rows(self.before)
        before.scale = self.scale
        return before

    def _on_raw_rows(self, dictionary: Dictionary) -> SAE:
        sae = rescaled(dictionary.sae().without_training_parameters(), 1 / self.factor)
        return on_raw_rows(sae, self.normalisation)

    def saes(self, after: Dictionary) -> list[SAE]:
        """Before and after, on raw rows, with the metric of this training."""
        return [self._on_raw_rows(self.before), self._on_raw_rows(after)]

    def measured(
        self,
        after: Dictionary,
        stored: RowSource,
        training: TrainingConfig,
        communicator: Communicator,
    ) -> list[dict[str, Any]]:
        """Both SAEs' measures on these rows, and their mean `loss` on normalised ones, by one pass."""
        sparsity, weight = training.sparsity or "none", training.sparsity_weight or 0.0
        # Of the penalty, such as the price of excess L0 that training found.
        penalty = self.before.activation.penalty(sparsity)
        learned = {name: getattr(after, name) for name in penalty.initial(1)}
        on_normalised_rows = [self.before.changed(None, **learned), after]
        saes, mean = self.saes(after), self.normalisation.mean
        total = torch.zeros(1 + len(saes), dtype=torch.float64, device=mean.device)

        def batches() -> Iterator[Tensor]:
            for raw in raw_batches(stored, communicator):
                rows = self.normalisation(moved(raw, mean.device).to(mean.dtype))
                batch = Batch.of(rows, saes[0].d_in)
                total[0] += batch.size
                for index, dictionary in enumerate(on_normalised_rows, 1):
                    loss = dictionary.loss(batch, sparsity, weight).value
                    total[index] += batch.size * loss.double()
                yield raw

        measures = reconstructions(saes, batches(), communicator)
        count, *losses = communicator.all_reduce(total).tolist()
        for measured, loss in zip(measures, losses, strict=True):
            measured["loss"] = loss / count
        return measures

    def state(self) -> dict[str, Tensor]:
        tensors = self.before.tensors()
        tensors["factor"] = torch.tensor(self.factor, dtype=torch.float64)
        if self.scale is not None:
            tensors["scale"] = self.scale
        return {f"start.{name}": tensor for name, tensor in tensors.items()}

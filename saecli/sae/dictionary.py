"""The model: a dictionary that reconstructs rows, or predicts targets from them.

    z = act(x @ W_enc + b_enc)        y_hat = z @ W_dec + b_dec  [+ x @ W_skip]

The encoder does not subtract `b_dec`, so that the decoder step changes no code. `SAE` holds W_dec; `Coupled` derives it
from W_enc in training. To add a kind, subclass `Dictionary` and write its `decoder`. A dictionary is

- a transcoder if its targets y are not its rows x: Dunefsky, Chlenski and Nanda, "Transcoders Find Interpretable LLM
  Feature Circuits" (2024); with a skip Paulo, Shabalin and Belrose, "Transcoders Beat Sparse Autoencoders for
  Interpretability" (2025);
- a crosscoder if its rows join several hook points: Lindsey et al., "Sparse Crosscoders for Cross-Layer Features and
  Model Diffing" (2024);
- nested if prefixes of its latents are each trained to reconstruct: Bussmann, Nabeshima, Karvonen and Nanda, "Learning
  Multi-Level Features with Matryoshka Sparse Autoencoders" (2025), equation 5.

Shapes: B rows, b in this process, D = d_in, E = d_out, F = d_sae, L prefixes; one, of all latents, unless nested.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ..base.devices import without_autocast
from ..base.errors import ConfigError
from .activations import Activation, KeepsK, Parameters
from .codes import Codes, PreActivations, Prefixes


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows and their targets; each process holds a part of the batch."""

    x: Tensor  # this process' rows, (b, D)
    y: Tensor  # their targets, (b, E); x itself for reconstruction
    size: int  # B
    # Ascending positions of these rows in the batch, (b,), on the CPU; None for all.
    index: Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: Tensor,
        d_in: int | None = None,
        size: int | None = None,
        index: Tensor | None = None,
    ) -> Self:
        """Rows to reconstruct, (b, D), or if wider than `d_in` with targets, (b, D + E); whole without a size."""
        size = len(rows) if size is None else size
        if d_in is None or rows.shape[1] == d_in:
            return cls(rows, rows, size, index)
        return cls(rows[:, :d_in].contiguous(), rows[:, d_in:].contiguous(), size, index)

    @classmethod
    def joined(cls, batches: Sequence[Self]) -> Self:
        x = torch.cat([batch.x for batch in batches])
        reconstructs = all(batch.y is batch.x for batch in batches)
        y = x if reconstructs else torch.cat([batch.y for batch in batches])
        *begins, size = accumulate((batch.size for batch in batches), initial=0)
        if all(batch.index is None for batch in batches):
            return cls(x, y, size)
        numbers = [batch.numbers + begin for batch, begin in zip(batches, begins, strict=True)]
        return cls(x, y, size, torch.cat(numbers))

    @property
    def numbers(self) -> Tensor:
        """Positions in the batch, (b,), on the CPU."""
        return torch.arange(self.size) if self.index is None else self.index

    def first(self, count: int) -> "Batch":
        count = min(count, self.size)
        here = count if self.index is None else int((self.index < count).sum())
        x = self.x[:here]
        y = x if self.y is self.x else self.y[:here]
        return Batch(x, y, count, None if self.index is None else self.index[:here])


@dataclass(frozen=True, eq=False)
class Normalisation:
    """The metric of an SAE's training, `(x - mean) / scale`, of rows with their targets next to them.

    On raw rows, whose weights hold the scales, it is about 0: `(y_hat - y) / target_scale` are the errors that training
    minimised, and `W_dec / target_scale` its directions.
    """

    mean: Tensor  # (D + E,), as scale; in training (D,) if the targets are the rows
    scale: Tensor
    variance: Tensor  # mean squared distance of normalised training targets from their mean; NaN if unknown
    d_in: int
    kept: Tensor | None = None  # scale of the SAE's metric, (D + E,), if not this

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "scale": self.scale, "variance": self.variance}

    def to(self, where: torch.device | torch.dtype) -> "Normalisation":
        parts = {name: tensor.to(where) for name, tensor in self.tensors().items()}
        return Normalisation(**parts, d_in=self.d_in, kept=self.kept)

    def inverse(self) -> "Normalisation":
        return replace(self, mean=-self.mean / self.scale, scale=1 / self.scale)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised rows, (B, D) or (B, D + E), a new tensor."""
        width = x.shape[1]
        return (x - self.mean[:width]) / self.scale[:width]

    def of_sae(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and scale of rows, (D,), and of targets, (E,)."""
        D = self.d_in
        targets = slice(D, None) if len(self.mean) > D else slice(None)
        return self.mean[:D], self.scale[:D], self.mean[targets], self.scale[targets]

    @property
    def target_scale(self) -> Tensor:
        return self.of_sae()[3]

    @property
    def metric(self) -> str:
        """For tables: "training", or "raw" if FVU and cosines are raw targets'."""
        low, high = self.target_scale.aminmax()
        return "raw" if high == low else "training"


@dataclass(frozen=True)
class Loss:
    """A batch's loss, or this process' part of the sum."""

    value: Tensor  # squared error, averaged over prefixes, plus weighted penalty; mean over rows
    squared_error: Tensor  # mean over rows of `||y_hat - y||^2`, by all latents
    codes: Codes  # of this process' rows, (b, F)


class Dictionary(Module, ABC):
    """Encoder, activation and decoder bias; subclasses define W_dec. Parameters are frozen until `requires_grad_`.

    Some have `prefixes`, see `Prefixes`; `W_skip`, an affine skip, (D, E); or `widths` of hook points, in the order of
    the targets.
    """

    LATENT_DIMENSIONS: ClassVar[dict[str, int]] = {"W_enc": 1, "b_enc": 0, "W_dec": 0, "Delta": 0}

    W_enc: Tensor  # (D, F)
    b_enc: Tensor  # (F,)
    b_dec: Tensor  # (E,)
    W_skip: Tensor | None
    scale: Tensor | None  # of its `normalisation`, (D + E,)

    def __init__(
        self,
        tensors: Mapping[str, Tensor | None],
        activation: Activation,
        learned: Iterable[str] = (),
        prefixes: Prefixes = (),
        widths: Sequence[int] = (),
    ) -> None:
        """`tensors`: all parameters by name, W_skip None without a skip; `learned`: names of the activation's."""
        super().__init__()
        self.activation = activation
        self.prefixes = tuple(prefixes)
        self.widths = tuple(widths)
        self._learned = tuple(learned)
        for name, tensor in tensors.items():
            frozen = None if tensor is None else Parameter(tensor.detach(), requires_grad=False)
            self.register_parameter(name, frozen)
        self.register_buffer("scale", None, persistent=False)

    @abstractmethod
    def decoder(self) -> Tensor:
        """W_dec, (F, E), differentiable in the parameters."""

    @property
    def d_in(self) -> int:
        return self.W_enc.shape[0]

    @property
    def d_out(self) -> int:
        return len(self.b_dec)

    @property
    def d_sae(self) -> int:
        return self.W_enc.shape[1]

    @property
    def hook_columns(self) -> list[slice]:
        """Columns of each hook point in the targets."""
        ends = accumulate(self.widths or (self.d_out,), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    @property
    def normalisation(self) -> Normalisation:
        """The metric of its training; raw rows' if unknown."""
        ones = self.b_dec.new_ones(self.d_in + self.d_out)
        scale = ones if self.scale is None else self.scale
        return Normalisation(torch.zeros_like(ones), scale, torch.tensor(torch.nan), self.d_in)

    def weighed(self, W_dec: Tensor) -> Tensor:
        """A matrix whose row norms weigh latents in penalties: W_dec, or a crosscoder's sums over hook points."""
        if not self.widths:
            return W_dec
        norms = [W_dec[:, columns].norm(dim=1) for columns in self.hook_columns]
        return torch.stack(norms).sum(0)[:, None]

    @property
    def activation_parameters(self) -> Parameters:
        return {name: getattr(self, name) for name in self._learned}

    @property
    def estimates(self) -> tuple[str, ...]:
        """Names of the activation's and penalty's parameters without gradient."""
        return tuple(name for name in self._learned if name not in self.activation.trained)

    def latent_dimension(self, name: str) -> int | None:
        """The dimension that counts latents, if any."""
        if name in self._learned:
            return 0 if getattr(self, name).shape == (self.d_sae,) else None
        return self.LATENT_DIMENSIONS.get(name)

    def pre_activations(self, x: Tensor) -> Tensor:
        """`x @ W_enc + b_enc`, (B, F)."""
        return PreActivations.apply(x, self.W_enc, self.b_enc)

    def codes(self, x: Tensor) -> Codes:
        """The codes of rows, (B, D), in its dtype and on its device."""
        return self.activated(self.pre_activations(x))

    def activated(self, pre: Tensor, training: bool = False) -> Codes:
        """The codes of pre-activations, (B, F); a training batch's may depend on all of it."""
        function = self.activation.training_codes if training else self.activation
        parameters = self.activation_parameters
        if self.activation.compares_directions:
            W_enc = self.W_enc
            if self.scale is not None:  # else rows, and so W_enc, are in the metric already
                W_enc = W_enc * self.scale[: self.d_in, None]
            parameters = parameters | {"W_enc": W_enc}
        return function(pre, parameters)

    def predicted(self, x: Tensor, codes: Codes) -> Tensor:
        """y_hat by each prefix, (B, L, E), the last by all latents."""
        return codes.prefix_times(self.decoder(), self.prefixes) + self._base(x)[..., None, :]

    def squared_errors(
        self, batch: Batch, codes: Codes, W_dec: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """`||y_hat - y||^2` of each prefix, summed over rows, (L,); `base`: the prediction without codes."""
        offset = ((self._base(batch.x) if base is None else base) - batch.y)[:, None]
        return (codes.prefix_times(W_dec, self.prefixes) + offset).square().sum(-1).sum(0)

    def _base(self, x: Tensor) -> Tensor:
        """The prediction without codes, (E,), or with a skip (B, E)."""
        return self.b_dec if self.W_skip is None else torch.addmm(self.b_dec, x, self.W_skip)

    def loss(self, batch: Batch, sparsity: str = "none", weight: float = 0.0) -> Loss:
        """`mean over rows and prefixes of ||y_hat - y||^2 + weight * penalty`, plus the same error of the activation's
        `gates`; `sparsity` names the penalty. The batch may be empty in this process."""
        pre, parameters = self.pre_activations(batch.x), self.activation_parameters
        codes = self.activated(pre, training=True)
        gates = self.activation.gates(codes, parameters)
        if not len(batch.x):
            nothing = 0.0 * self.b_enc.sum()
            return Loss(nothing, nothing, codes)
        W_dec = self.decoder()
        errors = self.squared_errors(batch, codes, W_dec) / batch.size
        value = errors.mean()
        if gates is not codes:
            W_dec, base = W_dec.detach(), self._base(batch.x).detach()
            value = value + self.squared_errors(batch, gates, W_dec, base).mean() / batch.size
        if sparsity != "none":  # a mean over this process' rows
            penalty = self.activation.penalty(sparsity)
            added = penalty.value(pre, gates, self.weighed(W_dec), parameters)
            value = value + weight * (len(batch.x) / batch.size) * added
        return Loss(value, errors[-1], codes)

    @without_autocast
    def encode(self, x: Tensor) -> Tensor:
        """The codes, (..., F), of raw activations, (..., D), of any floating dtype, on its device."""
        codes = self.codes(self._rows("encode", x, self.d_in)).dense()
        return codes.reshape(*x.shape[:-1], self.d_sae)

    @without_autocast
    def decode(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        """The predictions, (..., E), of codes, (..., F); without a skip's part unless `x`, (..., D), is given."""
        base = self.b_dec if x is None else self._base(self._rows("decode", x, self.d_in))
        y_hat = torch.addmm(base, self._rows("decode", z, self.d_sae), self.decoder())
        return y_hat.reshape(*z.shape[:-1], len(self.b_dec))

    @without_autocast
    def forward(self, x: Tensor) -> Tensor:
        """The predictions, (..., E), from raw activations, (..., D), a skip's part included."""
        rows = self._rows("encode", x, self.d_in)
        return self.predicted(rows, self.codes(rows))[:, -1].reshape(*x.shape[:-1], self.d_out)

    def tensors(self) -> dict[str, Tensor]:
        """An `SAE`'s parameters by name, detached; W_skip if it has one."""
        skip = [] if self.W_skip is None else ["W_skip"]
        tensors = {"W_enc": self.W_enc, "b_enc": self.b_enc, "W_dec": self.decoder()}
        tensors |= {name: getattr(self, name) for name in ("b_dec", *self._learned, *skip)}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def sae(self) -> "SAE":
        """A frozen copy as an `SAE`."""
        row_major = torch.contiguous_format
        tensors = {
            name: tensor.clone(memory_format=row_major) for name, tensor in self.tensors().items()
        }
        return self._sae_of(tensors, self.activation, self._learned)

    def _sae_of(
        self, tensors: Mapping[str, Tensor], activation: Activation, learned: Iterable[str]
    ) -> "SAE":
        weights = ("W_enc", "b_enc", "W_dec", "b_dec", "W_skip")
        sae = SAE(
            **{name: tensors[name] for name in weights if name in tensors},
            activation=activation,
            activation_parameters={name: tensors[name] for name in learned},
            prefixes=self.prefixes,
            widths=self.widths,
        )
        sae.scale = None if self.scale is None else self.scale.to(sae.W_enc)
        return sae

    @property
    def k(self) -> int | None:
        """The activation's k, if any."""
        return self.activation.k if isinstance(self.activation, KeepsK) else None

    def __repr__(self) -> str:
        sizes = f"d_in={self.d_in}, d_out={self.d_out}, d_sae={self.d_sae}"
        kept_as = f"{name_of(self.W_enc.dtype)}, {self.W_enc.device}"
        return f"{type(self).__name__}({self.activation!r}, {sizes}, {kept_as})"

    def _rows(self, verb: str, tensor: Tensor, width: int) -> Tensor:
        device = self.W_enc.device
        if tensor.shape[-1:] != (width,) or tensor.device != device:
            raise ConfigError(
                f"cannot {verb}: expected a tensor of shape (..., {width}) on the SAE's device, which "
                f"`.to({str(device)!r})` moves it to, got {tuple(tensor.shape)} on {tensor.device}"
            )
        return tensor.to(self.W_enc.dtype).reshape(math.prod(tensor.shape[:-1]), width)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SAE(Dictionary):
    """A sparse autoencoder, transcoder or crosscoder on raw activations; `metadata`: known settings and hook point."""

    W_dec: Tensor  # (F, E)

    def __init__(
        self,
        W_enc: Tensor,
        b_enc: Tensor,
        W_dec: Tensor,
        b_dec: Tensor,
        activation: Activation,
        activation_parameters: Parameters | None = None,
        *,
        prefixes: Prefixes = (),
        W_skip: Tensor | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        learned = activation_parameters or {}
        tensors = {"W_enc": W_enc, "b_enc": b_enc, "b_dec": b_dec, **learned, "W_skip": W_skip}
        super().__init__(tensors | {"W_dec": W_dec}, activation, learned, prefixes, widths)
        self.metadata: dict[str, Any] = {}

    @property
    def cfg(self) -> dict[str, Any]:
        """Its `metadata`, activation, sizes, dtype and device."""
        return {
            **self.metadata,
            "act": self.activation.name,
            **self.activation.to_json(),
            "d_in": self.d_in,
            "d_out": self.d_out,
            "d_sae": self.d_sae,
            "prefixes": self.prefixes,
            "widths": self.widths,
            "skip": self.W_skip is not None,
            "metric": self.normalisation.metric,
            "dtype": name_of(self.W_enc.dtype),
            "device": str(self.W_enc.device),
        }

    def decoder(self) -> Tensor:
        return self.W_dec

    def changed(self, activation: Activation | None = None, **tensors: Tensor) -> "SAE":
        """A copy with other tensors, or with an activation and the parameters of its use, without those of training."""
        learned = self._learned if activation is None else activation.parameters(1)
        sae = self._sae_of(self.tensors() | tensors, activation or self.activation, learned)
        sae.metadata = self.metadata
        return sae

    def with_widths(self, widths: Sequence[int]) -> "SAE":
        """A crosscoder of hook points of these widths."""
        sae = self.changed()
        sae.widths = tuple(widths)
        return sae

    def without_training_parameters(self) -> "SAE":
        return self.changed(self.activation)

    def copy_to(self, *where: torch.device | torch.dtype | str) -> "SAE":
        """A copy on another device or in another dtype, row-major as from a file: the same last bits."""
        tensors = self.tensors()
        for to in where:
            tensors = {name: tensor.to(to) for name, tensor in tensors.items()}
        return self.changed(None, **{name: tensor.contiguous() for name, tensor in tensors.items()})

    def on_raw_rows(self, normalisation: Normalisation) -> "SAE":
        """The same codes of raw rows, and predictions `target_scale * y_hat + target_mean`."""
        mean, scale, target_mean, target_scale = (
            part.to(self.W_enc) for part in normalisation.of_sae()
        )
        W_enc = self.W_enc / scale[:, None]
        tensors = {
            "W_enc": W_enc,
            "b_enc": self.b_enc - mean @ W_enc,
            "W_dec": self.W_dec * target_scale,
            "b_dec": self.b_dec * target_scale + target_mean,
        }
        if self.W_skip is not None:
            W_skip = self.W_skip / scale[:, None] * target_scale
            tensors |= {"W_skip": W_skip, "b_dec": tensors["b_dec"] - mean @ W_skip}
        sae = self.changed(None, **tensors)
        if sae.scale is not None:
            sae.scale = sae.scale * torch.cat([scale, target_scale]).abs()
        return sae


class Coupled(Dictionary):
    """A dictionary whose decoder follows the encoder, `W_dec = c W_enc' B + Delta`.

    B, (D, E), is the regression of targets on rows, None for the identity. With c = 1 and no Delta, (F, E), weights are
    tied. Descent on the encoder holds Delta.
    """

    Delta: Tensor | None
    B: Tensor | None

    def __init__(self, start: SAE, c: float, Delta: Tensor | None, B: Tensor | None = None) -> None:
        learned = start.activation_parameters
        tensors = {"W_enc": start.W_enc, "b_enc": start.b_enc, "b_dec": start.b_dec, **learned}
        parts = {"W_skip": start.W_skip, "Delta": Delta}
        super().__init__(tensors | parts, start.activation, learned, start.prefixes, start.widths)
        self.c, self.untied = c, False
        self.register_buffer("B", B)

    def direction(self) -> Tensor:
        """`W_enc' B`, (F, E)."""
        return self.W_enc.T if self.B is None else self.W_enc.T @ self.B

    def decoder(self) -> Tensor:
        if self.Delta is None:
            return self.c * self.direction() if self.c != 1 else self.direction()
        return torch.add(self.Delta, self.direction(), alpha=self.c) if self.c else self.Delta

    @torch.no_grad()
    def untie(self) -> None:
        """Make Delta the whole decoder, c = 0, also after each `set_decoder`."""
        assert self.Delta is not None  # tied weights, without a residual, are never untied
        self.Delta.data = self.decoder().contiguous()
        self.c = 0.0
        self.untied = True

    @torch.no_grad()
    def set_decoder(
        self, c: float, Delta: Tensor, b_dec: Tensor, skip: Tensor | None = None
    ) -> None:
        """Take a decoder step's c, Delta, (F, E), b_dec, (E,), and W_skip, (D, E)."""
        assert self.Delta is not None
        if self.untied:
            self.Delta.copy_(torch.add(Delta, self.direction(), alpha=c))
        else:
            self.c = c
            self.Delta.data = Delta
        self.b_dec.data = b_dec
        if skip is not None and self.W_skip is not None:
            self.W_skip.copy_(skip)

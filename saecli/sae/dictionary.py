"""The model: a dictionary that reconstructs rows, or predicts targets from them.

    z = act(x @ W_enc + b_enc)        y_hat = z @ W_dec + b_dec  [+ x @ W_skip]

The targets y are the rows x themselves, or for a transcoder what is to be predicted from them, with or without an
affine skip. Source: Dunefsky, Chlenski and Nanda, "Transcoders Find Interpretable LLM Feature Circuits" (2024); with a
skip Paulo, Shabalin and Belrose, "Transcoders Beat Sparse Autoencoders for Interpretability" (2025).

The encoder does not subtract `b_dec`, so that the decoder step changes no code. `SAE` holds W_dec itself; `Coupled`,
used in training, derives it from W_enc. To add a kind, subclass `Dictionary` and write its `decoder`.

Rows of several places side by side make a crosscoder, whose penalties weigh a latent by the sum of its decoder norms
there. Source: Lindsey et al., "Sparse Crosscoders for Cross-Layer Features and Model Diffing" (2024).

A dictionary may be nested: each of some prefixes of its latents is then trained to reconstruct the rows by itself.
Source: Bussmann, Nabeshima, Karvonen and Nanda, "Learning Multi-Level Features with Matryoshka Sparse Autoencoders"
(2025), equation 5.

Shapes: B rows, D = d_in, E = d_out, F = d_sae, P places, L prefixes; one, of all latents, if the dictionary is not
nested.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ..base.errors import ConfigError
from .activations import Activation, KeepsK, Parameters
from .batch import Batch
from .codes import Codes, Prefixes
from .encoding import pre_activations


@dataclass(frozen=True)
class Loss:
    """The loss of a batch; with several processes, this process' part, and the parts sum to the batch's.

    Args:
        value: squared error, of a nested dictionary its mean over prefixes, plus weighted penalty, mean over the rows
            of the batch.
        squared_error: mean over rows of `||y_hat - y||^2`.
        codes: of this process' rows, (b, F).
    """

    value: Tensor
    squared_error: Tensor
    codes: Codes


class Dictionary(Module, ABC):
    """Encoder, activation and decoder bias; subclasses define the decoder weights.

    Its tensors are parameters, frozen until `requires_grad_` lets descent move them.

    Args:
        W_enc: encoder weights, (D, F).
        b_enc: encoder bias, (F,).
        b_dec: decoder bias, (E,).
        activation: maps pre-activations to codes.
        activation_parameters: the activation's parameters, by names that differ from the other tensors'.
        prefixes: of a nested dictionary, the number of latents in each prefix, ascending, the last being F.
        W_skip: weights of the affine skip, (D, E); None for none.
        widths: of the places that stand side by side in the targets, of a crosscoder; none for one.
    """

    LATENT_DIMENSIONS: ClassVar[dict[str, int]] = {"W_enc": 1, "b_enc": 0, "W_dec": 0, "Delta": 0}

    def __init__(self, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor, activation: Activation,
                 activation_parameters: Parameters | None = None, prefixes: Prefixes = (),
                 W_skip: Tensor | None = None, widths: Sequence[int] = ()) -> None:
        super().__init__()
        self.activation, self.prefixes, self.widths = activation, tuple(prefixes), tuple(widths)
        self._learned = tuple(activation_parameters or {})
        for name, tensor in {"W_enc": W_enc, "b_enc": b_enc, "b_dec": b_dec, **(activation_parameters or {})}.items():
            self.register_parameter(name, Parameter(tensor.detach(), requires_grad=False))
        self.register_parameter("W_skip", None if W_skip is None else Parameter(W_skip.detach(), requires_grad=False))

    @abstractmethod
    def decoder(self) -> Tensor:
        """Decoder weights, one dictionary vector per row, (F, E); differentiable in the parameters."""

    @property
    def d_in(self) -> int:
        """Width of the rows."""
        return self.W_enc.shape[0]

    @property
    def d_out(self) -> int:
        """Width of the targets."""
        return len(self.b_dec)

    @property
    def d_sae(self) -> int:
        """Number of latents."""
        return self.W_enc.shape[1]

    @property
    def places(self) -> list[slice]:
        """Where each place is in the targets; one for all, if it is no crosscoder."""
        return [slice(begin, end) for begin, end in pairwise(accumulate(self.widths or (self.d_out,), initial=0))]

    def weighed(self, W_dec: Tensor) -> Tensor:
        """What penalties take for decoder weights, whose norms they weigh: W_dec, (F, E), or of a crosscoder the sum of
        the norms over places, (F, 1)."""
        if not self.widths:
            return W_dec
        return torch.stack([W_dec[:, place].norm(dim=1) for place in self.places]).sum(0)[:, None]

    @property
    def activation_parameters(self) -> Parameters:
        """The activation's parameters, by name."""
        return {name: getattr(self, name) for name in self._learned}

    def latent_dimension(self, name: str) -> int | None:
        """The latent dimension of a parameter; None if it has none, as b_dec."""
        if name in self._learned:
            return 0 if getattr(self, name).shape == (self.d_sae,) else None
        return self.LATENT_DIMENSIONS.get(name)

    def pre_activations(self, x: Tensor) -> Tensor:
        """`x @ W_enc + b_enc`, (B, F), of rows x, (B, D)."""
        return pre_activations(x, self.W_enc, self.b_enc)

    def codes(self, x: Tensor) -> Codes:
        """The codes of rows x, (B, D), in the dictionary's dtype and on its device."""
        return self.activation(self.pre_activations(x), self.activation_parameters)

    def predicted(self, x: Tensor, codes: Codes) -> Tensor:
        """The predictions by each prefix of the codes of rows x, (B, L, E), the last by all latents."""
        return codes.prefix_times(self.decoder(), self.prefixes) + self._base(x)[..., None, :]

    def squared_errors(self, batch: Batch, codes: Codes, W_dec: Tensor) -> Tensor:
        """`||y_hat - y||^2` of each prefix, a sum over a batch's rows, (L,)."""
        offset = (self._base(batch.x) - batch.y)[:, None]
        return (codes.prefix_times(W_dec, self.prefixes) + offset).square().sum(-1).sum(0)

    def _base(self, x: Tensor) -> Tensor:
        """What is predicted from rows x without codes: `b_dec`, (E,), or with a skip `x @ W_skip + b_dec`, (B, E)."""
        return self.b_dec if self.W_skip is None else torch.addmm(self.b_dec, x, self.W_skip)

    def loss(self, batch: Batch, sparsity: str = "none", weight: float = 0.0) -> Loss:
        """`mean over rows of ||y_hat - y||^2 + weight * penalty`, differentiable in the parameters; of a nested
        dictionary, the first term is the mean over its prefixes, each of which reconstructs by its own latents alone.

        Args:
            batch: of which this process may hold no rows.
            sparsity: the penalty, one of the activation's, or `none`.
            weight: of the penalty.
        """
        pre = self.pre_activations(batch.x)
        codes = self.activation.training_codes(pre, self.activation_parameters)
        if not len(batch.x):
            nothing = 0.0 * self.b_enc.sum()
            return Loss(nothing, nothing, codes)
        W_dec = self.decoder()
        errors = self.squared_errors(batch, codes, W_dec) / batch.size
        value = errors.mean()
        if sparsity != "none":  # a mean over this process' rows
            penalty = self.activation.penalty(sparsity, pre, codes, self.weighed(W_dec), self.activation_parameters)
            value = value + weight * (len(batch.x) / batch.size) * penalty
        return Loss(value, errors[-1], codes)

    def encode(self, x: Tensor) -> Tensor:
        """The codes of raw activations, `act(x @ W_enc + b_enc)`.

        Args:
            x: (..., D), of any floating-point dtype, on the dictionary's device.

        Returns:
            (..., F), in the dictionary's dtype.

        Raises:
            ConfigError: x is anything else.
        """
        codes = self.codes(self._rows("encode", x, self.d_in)).dense()
        return codes.reshape(*x.shape[:-1], self.d_sae)

    def decode(self, z: Tensor) -> Tensor:
        """The predictions from codes, `z @ W_dec + b_dec`, without a skip's part.

        Args:
            z: (..., F), of any floating-point dtype, on the dictionary's device.

        Returns:
            (..., E), in the dictionary's dtype.

        Raises:
            ConfigError: z is anything else.
        """
        y_hat = torch.addmm(self.b_dec, self._rows("decode", z, self.d_sae), self.decoder())
        return y_hat.reshape(*z.shape[:-1], len(self.b_dec))

    def forward(self, x: Tensor) -> Tensor:
        """The predictions, (..., E), from raw activations x, (..., D): `decode(encode(x))`, and a skip's part."""
        rows = self._rows("encode", x, self.d_in)
        return self.predicted(rows, self.codes(rows))[:, -1].reshape(*x.shape[:-1], self.d_out)

    def sae(self) -> "SAE":
        """A frozen copy as an `SAE`."""
        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().clone(memory_format=torch.contiguous_format)

        return SAE(*map(copy, (self.W_enc, self.b_enc, self.decoder(), self.b_dec)), self.activation,
                   {name: copy(tensor) for name, tensor in self.activation_parameters.items()}, self.prefixes,
                   None if self.W_skip is None else copy(self.W_skip), self.widths)

    @property
    def k(self) -> int | None:
        """The activation's k; None for one without."""
        return self.activation.k if isinstance(self.activation, KeepsK) else None

    def __repr__(self) -> str:
        kept = f", k={self.k}" if self.k else ""
        nested = f", prefixes={self.prefixes}" if self.prefixes else ""
        dtype = str(self.W_enc.dtype).removeprefix("torch.")
        out = f", d_out={self.d_out}" if self.d_out != self.d_in else ""
        skip = (", skip" if self.W_skip is not None else "") + (f", widths={self.widths}" if self.widths else "")
        return (f"{type(self).__name__}({self.activation.name}{kept}, d_in={self.d_in}{out}, d_sae={self.d_sae}{nested}"
                f"{skip}, {dtype}, {self.W_enc.device})")

    def _rows(self, verb: str, given: Tensor, width: int) -> Tensor:
        """A given tensor, (..., width), as rows, (B, width), in the dictionary's dtype."""
        device = self.W_enc.device
        if not isinstance(given, Tensor):
            got = f"{type(given).__name__}; make it one by `torch.as_tensor`"
        elif not given.is_floating_point():
            got = f"{given.dtype}; convert it by `.float()`"
        elif not given.ndim or given.shape[-1] != width:
            got = f"shape {tuple(given.shape)}"
        elif given.device != device:
            got = f"one on {given.device}; move one of the two by `.to`"
        else:
            return given.to(self.W_enc.dtype).reshape(math.prod(given.shape[:-1]), width)
        raise ConfigError(f"cannot {verb}: expected a floating-point tensor of shape (..., {width}) on {device}, got "
                          f"{got}")


class SAE(Dictionary):
    """A sparse autoencoder, or a transcoder, that acts on raw activations.

    Args:
        W_enc: encoder weights, (D, F).
        b_enc: encoder bias, (F,).
        W_dec: decoder weights, one dictionary vector per row, (F, E).
        b_dec: decoder bias, (E,).
        activation: maps pre-activations to codes.
        activation_parameters: the activation's parameters, by name.
        prefixes: of a nested SAE, the number of latents in each prefix, ascending, the last being F.
        W_skip: of a transcoder with a skip, its weights, (D, E).
        widths: of a crosscoder's places.

    Attributes:
        metadata: where it comes from, as far as that is known: the settings of its run, the place in its model.
    """

    def __init__(self, W_enc: Tensor, b_enc: Tensor, W_dec: Tensor, b_dec: Tensor, activation: Activation,
                 activation_parameters: Parameters | None = None, prefixes: Prefixes = (),
                 W_skip: Tensor | None = None, widths: Sequence[int] = ()) -> None:
        super().__init__(W_enc, b_enc, b_dec, activation, activation_parameters, prefixes, W_skip, widths)
        self.metadata: dict[str, Any] = {}
        self.register_parameter("W_dec", Parameter(W_dec.detach(), requires_grad=False))

    @property
    def cfg(self) -> dict[str, Any]:
        """What it is: its `metadata`, activation, sizes, dtype and device."""
        shape = {"act": self.activation.name, **self.activation.to_json(), "d_in": self.d_in, "d_out": self.d_out,
                 "d_sae": self.d_sae, "prefixes": self.prefixes, "widths": self.widths, "skip": self.W_skip is not None}
        return self.metadata | shape | {"dtype": str(self.W_enc.dtype).removeprefix("torch."),
                                        "device": str(self.W_enc.device)}

    def _repr_html_(self) -> str:
        from ..base.tables import html_table  # rich takes a while to import

        return html_table(type(self).__name__, self.cfg)

    def decoder(self) -> Tensor:
        return self.W_dec

    def tensors(self) -> dict[str, Tensor]:
        """All parameters by name, detached: W_enc, b_enc, W_dec, b_dec, the activation's, and W_skip if it has one."""
        names = ("W_enc", "b_enc", "W_dec", "b_dec", *self._learned, *(["W_skip"] * (self.W_skip is not None)))
        return {name: getattr(self, name).detach() for name in names}

    def changed(self, activation: Activation | None = None, **tensors: Tensor) -> Self:
        """The same with another activation or other tensors, named as in `tensors`."""
        new = self.tensors() | tensors
        learned = {name: new.pop(name) for name in self._learned}
        changed = type(self)(**new, activation=activation or self.activation, activation_parameters=learned,
                             prefixes=self.prefixes, widths=self.widths)
        changed.metadata = self.metadata
        return changed

    def without_training_parameters(self) -> Self:
        """The same without the activation's parameters that only training needs."""
        kept = {name: getattr(self, name) for name in self.activation.parameters(1)}
        return type(self)(self.W_enc, self.b_enc, self.W_dec, self.b_dec, self.activation, kept, self.prefixes,
                          self.W_skip, self.widths)

    def copy_to(self, *args: torch.device | torch.dtype | str) -> Self:
        """A copy on another device or in another dtype; arguments as of `Tensor.to`.

        Its tensors are row-major, as from a file: products of other strides differ in their last bits."""
        return self.changed(**{name: tensor.to(*args).contiguous() for name, tensor in self.tensors().items()})

    def on_raw_rows(self, mean: Tensor, scale: Tensor, target_mean: Tensor | None = None,
                    target_scale: Tensor | None = None) -> Self:
        """This SAE, which acts on rows normalised to `(x - mean) / scale`, with the normalisation folded in.

        On raw rows the result has the same codes, and predicts `target_scale * y_hat + target_mean`.

        Args:
            mean: (D,).
            scale: positive, (D,).
            target_mean: of the targets, (E,); None for `mean`, where these are the rows.
            target_scale: likewise, (E,).
        """
        target_mean = mean if target_mean is None else target_mean
        target_scale = scale if target_scale is None else target_scale
        W_enc = self.W_enc / scale[:, None]
        tensors = {"W_enc": W_enc, "b_enc": self.b_enc - mean @ W_enc, "W_dec": self.W_dec * target_scale,
                   "b_dec": self.b_dec * target_scale + target_mean}
        if self.W_skip is not None:
            W_skip = self.W_skip / scale[:, None] * target_scale
            tensors |= {"W_skip": W_skip, "b_dec": tensors["b_dec"] - mean @ W_skip}
        return self.changed(**tensors)


class Coupled(Dictionary):
    """A dictionary whose decoder follows the encoder, `W_dec = c W_enc' B + Delta`.

    B is the identity where the targets are the rows, and else their linear regression on the rows. With c = 1 and no
    Delta the weights are tied. Delta stays fixed while descent moves the encoder.

    Args:
        start: its encoder, biases and activation are taken over.
        c: the multiple of the encoder.
        Delta: the residual, (F, E); None for none.
        B: (D, E); None for the identity.
    """

    def __init__(self, start: SAE, c: float, Delta: Tensor | None, B: Tensor | None = None) -> None:
        super().__init__(start.W_enc, start.b_enc, start.b_dec, start.activation, start.activation_parameters,
                         start.prefixes, start.W_skip, start.widths)
        self.c = c
        self.register_parameter("Delta", None if Delta is None else Parameter(Delta, requires_grad=False))
        self.register_buffer("B", B)

    def direction(self) -> Tensor:
        """`W_enc' B`, (F, E), which the decoder follows."""
        return self.W_enc.T if self.B is None else self.W_enc.T @ self.B

    def decoder(self) -> Tensor:
        """`c W_enc' B + Delta`, (F, E)."""
        if self.Delta is None:
            return self.c * self.direction() if self.c != 1 else self.direction()
        return torch.add(self.Delta, self.direction(), alpha=self.c) if self.c else self.Delta

    @torch.no_grad()
    def untie(self) -> None:
        """Let Delta be all of the decoder, with c = 0, so that it no longer follows the encoder."""
        self.Delta.data, self.c = self.decoder().contiguous(), 0.0

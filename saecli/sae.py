"""The sparse autoencoder itself.

    z = act(x @ W_enc + b_enc)        x_hat = z @ W_dec + b_dec

The encoder does not subtract `b_dec`, so that the decoder step moves no code. Shapes: B rows, D = d_in,
F = d_sae.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from .activations import Activation, KeepsK, Parameters
from .errors import ConfigError
from .products import NonZeros, reconstructions


@dataclass(frozen=True, repr=False)
class SAE:
    """A sparse autoencoder that acts on raw activations.

    Args:
        W_enc: encoder weights, (D, F).
        b_enc: encoder bias, (F,).
        W_dec: decoder weights, one dictionary vector a row, (F, D).
        b_dec: decoder bias, (D,).
        activation: what turns pre-activations into codes.
        parameters: the activation's learned parameters.
    """

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    activation: Activation
    parameters: Parameters = field(default_factory=dict)

    @property
    def d_in(self) -> int:
        """Width of the activations."""
        return self.W_enc.shape[0]

    @property
    def d_sae(self) -> int:
        """Number of latents."""
        return self.W_enc.shape[1]

    def pre_activations(self, x: Tensor) -> Tensor:
        """`x @ W_enc + b_enc`, (B, F), of rows x, (B, D)."""
        return torch.addmm(self.b_enc, x, self.W_enc)

    def encode(self, x: Tensor) -> Tensor:
        """The codes of raw activations, `act(x @ W_enc + b_enc)`.

        Args:
            x: (..., D), of any floating-point type, on the SAE's device.

        Returns:
            (..., F), computed in the SAE's own dtype and of that dtype.

        Raises:
            ConfigError: x is something else.
        """
        codes = self.activation(self.pre_activations(self._rows("encode", x, self.d_in)), self.parameters)
        return codes.reshape(*x.shape[:-1], codes.shape[-1])

    def decode(self, z: Tensor | NonZeros) -> Tensor:
        """The reconstructions of codes, `z @ W_dec + b_dec`.

        Args:
            z: (..., F), of any floating-point type, on the SAE's device; or those of (B, F) that are not zero.

        Returns:
            (..., D), computed in the SAE's own dtype and of that dtype.

        Raises:
            ConfigError: z is something else.
        """
        if isinstance(z, NonZeros):
            return reconstructions(z, self.W_dec, self.b_dec)
        x_hat = reconstructions(self._rows("decode", z, self.d_sae), self.W_dec, self.b_dec)
        return x_hat.reshape(*z.shape[:-1], self.d_in)

    def __call__(self, x: Tensor) -> Tensor:
        """The reconstructions, (..., D), of raw activations x, (..., D); as `decode` of `encode`."""
        return self.decode(self.encode(x))

    def __repr__(self) -> str:
        kept = f", k={self.activation.k}" if isinstance(self.activation, KeepsK) else ""
        dtype = str(self.W_enc.dtype).removeprefix("torch.")
        return f"SAE({self.activation.name}{kept}, d_in={self.d_in}, d_sae={self.d_sae}, {dtype}, {self.W_enc.device})"

    def _rows(self, verb: str, given: Tensor, width: int) -> Tensor:
        """What was given, (..., width), as rows, (B, width), of the SAE's dtype."""
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
        raise ConfigError(None, "cannot {verb}: expected a floating-point tensor of shape (..., {width}) on {device}, "
                                "got {got}", verb=verb, width=width, device=device, got=got)

    def tensors(self) -> dict[str, Tensor]:
        """All weights by name, the activation's parameters included."""
        return {"W_enc": self.W_enc, "b_enc": self.b_enc, "W_dec": self.W_dec, "b_dec": self.b_dec,
                **self.parameters}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same with other weights, by the names of `tensors`."""
        own = {name: tensors[name] for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
        return replace(self, **own, parameters={name: tensors[name] for name in self.parameters})

    def to(self, *args: torch.device | torch.dtype | str) -> Self:
        """A copy on another device or of another dtype; takes what `Tensor.to` takes."""
        return self.with_tensors({name: tensor.to(*args) for name, tensor in self.tensors().items()})

    def on_raw_rows(self, mean: Tensor, scale: Tensor) -> Self:
        """The SAE that does on raw rows what this one does on rows normalised to `(x - mean) / scale`.

        Its codes are the same, and its reconstructions are `scale * x_hat + mean`.

        Args:
            mean: what was subtracted, (D,).
            scale: what was divided by, positive, (D,) or a scalar.
        """
        W_enc = self.W_enc / scale.reshape(-1, 1)
        return replace(self, W_enc=W_enc, b_enc=self.b_enc - mean @ W_enc,
                       W_dec=self.W_dec * scale, b_dec=self.b_dec * scale + mean)

"""The sparse autoencoder itself.

    z = act(x @ W_enc + b_enc)        x_hat = z @ W_dec + b_dec

The encoder does not subtract `b_dec`, so that the decoder step moves no code. Shapes: B rows, D = d_in,
F = d_sae.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from .activations import Activation, Parameters
from .products import NonZeros, reconstructions


@dataclass(frozen=True)
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
        """The codes, (B, F), of rows x, (B, D)."""
        return self.activation(self.pre_activations(x), self.parameters)

    def decode(self, z: Tensor | NonZeros) -> Tensor:
        """The reconstructions, (B, D), of codes z, (B, F), or of those that are not zero."""
        return reconstructions(z, self.W_dec, self.b_dec)

    def __call__(self, x: Tensor) -> Tensor:
        """The reconstructions, (B, D), of rows x, (B, D)."""
        return self.decode(self.encode(x))

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

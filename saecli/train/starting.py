"""Starting a training from an SAE, in place of random directions.

Shapes: n rows, D = d_in, F = d_sae.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..base.console import Listener
from ..base.errors import ConfigError, RunError
from ..base.files import to_json
from ..base.home import Home
from ..sae.activations import Activation, JumpRelu, activation_to_json
from ..sae.codes import Prefixes
from ..sae.dictionary import SAE
from ..sae.library import lasting_name, open_sae
from ..store.rows import RowSource
from .normalisation import Normalisation


@dataclass(frozen=True, eq=False)
class Start:
    """The SAE that a training starts from.

    Args:
        name: a run's name, a folder's path, or an address on the hub, from which it can be opened again.
        hash: as of `fingerprint`.
        sae: it, acting on raw rows; None where training resumes from a checkpoint.
    """

    name: str
    hash: str
    sae: SAE | None

    @classmethod
    def open(cls, home: Home, sae: SAE | str | Path, listener: Listener) -> Self:
        """A start from an SAE, a run's name or whatever else `load_sae` takes."""
        subject, saved = open_sae(home, sae, listener)
        return cls(lasting_name(home, sae, subject), fingerprint(saved.sae), saved.sae)

    def again(self, home: Home, listener: Listener) -> Self:
        """The same with its SAE, opened again; RunError if that is another now."""
        found = Start.open(home, self.name, listener)
        if found.hash != self.hash:
            raise RunError(f"{self.name} is not the SAE that this run was begun from, though it has its name; train "
                           "anew")
        return replace(self, sae=found.sae)

    def settings(self, act: str) -> dict[str, Any]:
        """The settings of an activation of that name which determine the SAE's codes, such as `k`; none if it has
        another activation."""
        own = self.sae.activation
        return {name: getattr(own, name) for name in own.of_codes} if own.name == act else {}

    def settled(self, d_sae: int | None, prefixes: str | None, skip: bool, activation: Activation,
                rows: RowSource) -> dict[str, Any]:
        """The values of `d_sae`, `prefixes` and `skip` to train with.

        Args:
            d_sae, prefixes, skip: as given; what is not is the SAE's.
            activation: to train with.
            rows: to train on.

        Raises:
            ConfigError: the rows or their targets have another width than the SAE's, another `d_sae` is given, or
                initial thresholds are and the SAE has its own.
        """
        sae = self.sae
        for what, wanted, got in (("rows", sae.d_in, rows.d_in), ("targets", sae.d_out, rows.d_target or rows.d_in)):
            if wanted != got:
                raise ConfigError(f"--init {self.name} cannot be trained on these rows: expected {what} of {wanted} "
                                  f"dimensions, got {got}; use other rows, or another SAE", option="init")
        if sae.W_skip is not None and not rows.d_target:
            raise ConfigError(f"--init {self.name} is a transcoder: expected the store of what it predicts, got "
                              "none; name it with --target", option="init")
        if d_sae not in (None, sae.d_sae):
            raise ConfigError(f"--d-sae must be that of --init {self.name}, {sae.d_sae}, got {d_sae}; leave it out",
                              option="d_sae")
        if isinstance(activation, JumpRelu) and activation.threshold is not None and self._has_parameters(activation):
            raise ConfigError(f"--threshold does nothing with --init {self.name}, which has thresholds of its own; "
                              "leave it out", option="threshold")
        return {"d_sae": sae.d_sae, "prefixes": prefixes or ",".join(map(str, sae.prefixes)) or None,
                "skip": skip or sae.W_skip is not None}

    def initial(self, activation: Activation, sample: Tensor, normalisation: Normalisation, prefixes: Prefixes,
                skip: bool = False, widths: Sequence[int] = ()) -> SAE:
        """The SAE at the start of training, acting on normalised rows, where it does what it did on raw ones.

        An activation of the SAE's kind has the SAE's parameters; another one's are fitted to the sample. Codes are
        scaled so that encoder and decoder have one norm, as at any start, since Adam's steps are of one size for both.

        Args:
            activation: to train with.
            sample: normalised rows, (n, D), which give dtype and device.
            normalisation: of the rows.
            prefixes: of a nested SAE; none otherwise.
            skip: whether it has an affine skip, which is 0 at first if the SAE has none.
            widths: of a crosscoder's places.

        Raises:
            ConfigError: the activation has a target for L0 that cannot be reached from there.
        """
        mean, scale, target_mean, target_scale = (part.double() for part in normalisation.of_sae())
        own = self.sae.copy_to(torch.float64).copy_to(sample.device)
        # Raw rows are normalised ones, normalised by these.
        own = balanced(own.on_raw_rows(-mean / scale, 1 / scale, -target_mean / target_scale, 1 / target_scale))
        start = activation.parameters(own.d_sae) | activation.training_parameters(own.d_sae)
        x = sample.double()
        parameters = activation.continuing({name: tensor.to(own.W_enc) for name, tensor in start.items()},
                                           own.codes(x).count().item() / len(x))
        if self._has_parameters(activation):
            parameters |= own.activation_parameters
        else:
            pre = own.pre_activations(x)
            self._demand_positive(activation, (pre > 0).sum().item() / len(pre))
            parameters = activation.fitted(pre, parameters)
        W_skip = own.W_enc.new_zeros(own.d_in, own.d_out) if skip and own.W_skip is None else own.W_skip
        return SAE(own.W_enc, own.b_enc, own.W_dec, own.b_dec, activation, parameters, prefixes,
                   W_skip, widths).copy_to(sample.dtype)

    def _demand_positive(self, activation: Activation, positive: float) -> None:
        """Refuse a target for L0 above the number of positive pre-activations per row: thresholds of 0 would have less,
        and the controller, which multiplies them, would leave them there."""
        if isinstance(activation, JumpRelu) and activation.target_l0 is not None and positive < activation.target_l0:
            raise ConfigError(f"--target-l0 cannot be reached from --init {self.name}, of whose pre-activations "
                              f"{positive:.1f} per row are positive: expected that or less, got "
                              f"{activation.target_l0:g}; lower --target-l0, or use another --act", option="target_l0")

    def _has_parameters(self, activation: Activation) -> bool:
        """Whether the SAE's activation parameters are those of an activation."""
        return type(activation) is type(self.sae.activation)


def fingerprint(sae: SAE) -> str:
    """SHA-256 of what an SAE computes: its tensors, activation and prefixes, in hexadecimal."""
    digest = hashlib.sha256(to_json([activation_to_json(sae.activation), sae.prefixes]).encode())
    for name, tensor in sorted(sae.tensors().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    return digest.hexdigest()


def balanced(sae: SAE) -> SAE:
    """The same function of rows with codes scaled so that encoder and decoder have one norm; the SAE itself if its
    activation does not allow that."""
    factor = (sae.W_dec.norm() / sae.W_enc.norm()).sqrt().item()
    if not 0 < factor < float("inf"):
        return sae
    rescaled: Mapping[str, Tensor] | None = sae.activation.rescaled(sae.activation_parameters, factor)
    if rescaled is None:
        return sae
    return sae.changed(W_enc=sae.W_enc * factor, b_enc=sae.b_enc * factor, W_dec=sae.W_dec / factor, **rescaled)

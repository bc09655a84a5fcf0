"""The cells of an SAE, by its activation."""

import torch

from ..base.errors import ConfigError
from ..sae.activations import ACTIVATIONS, AbsTopK, Activation, ReluTopK, Thresholded, TopK
from ..sae.dictionary import SAE
from .cells import Cells, ThresholdedCells
from .largest_cells import LargestCells, ReluTopKCells
from .power_diagram import KthOrderDiagram, PowerDiagram, kth_order_diagram

KNOWN = (Thresholded, TopK, ReluTopK, AbsTopK)


def check_cells(activation: Activation) -> None:
    """Refuse an activation that is not piecewise affine, or whose cells are not implemented, by a ConfigError."""
    if not isinstance(activation, KNOWN):
        known = [name for name, kind in ACTIVATIONS.items() if issubclass(kind, KNOWN)]
        raise ConfigError(f"the activation {activation.name} has no cells that this tool knows; expected one of "
                          f"{', '.join(known)}; train such an SAE to see its geometry")


def cells_of(sae: SAE) -> Cells:
    """The partition that an SAE makes of its input space.

    Raises:
        ConfigError: as of `check_cells`.
    """
    check_cells(sae.activation)
    sae = sae.copy_to(torch.float64)
    # A latent's weights in one piece: they are gathered by the latent, ten times faster so.
    sae = sae.changed(W_enc=sae.W_enc.T.contiguous().T)
    if isinstance(sae.activation, Thresholded):
        return ThresholdedCells(sae, sae.activation.thresholds(sae.activation_parameters, sae.d_sae).double())
    if isinstance(sae.activation, ReluTopK):
        order = KthOrderDiagram(PowerDiagram.from_encoder(sae.W_enc, sae.b_enc), TopK(sae.activation.k), sae.d_sae)
        relu = ThresholdedCells(sae, torch.zeros(sae.d_sae, dtype=torch.float64))
        return ReluTopKCells(sae, LargestCells(sae, order), relu)
    order = kth_order_diagram(sae)
    assert order is not None  # every other activation of `KNOWN` has one
    return LargestCells(sae, order)


def cells_of_diagram(diagram: PowerDiagram, k: int = 1) -> LargestCells:
    """The cells of a power diagram of the K-th order, those of the TopK encoder that `to_encoder` gives.

    Args:
        diagram: its n sites, in D dimensions.
        k: K, from 1 to n.

    Source: the paper's theorem on TopK SAEs and K-th order power diagrams.
    """
    W_enc, b_enc = diagram.to_encoder()
    sae = SAE(W_enc, b_enc, W_enc.T, torch.zeros(len(W_enc), dtype=torch.float64), TopK(k))
    return LargestCells(sae, KthOrderDiagram(diagram, TopK(k), sae.d_sae))

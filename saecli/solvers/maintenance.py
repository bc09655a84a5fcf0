"""What is done to a dictionary between its steps: silencing, revival and balancing.

Shapes: n rows, D = d_in, F = d_sae.
"""

import math

import torch
from torch import Tensor

from ..dictionary import Coupled, Dictionary

LEAST_SIZE = 1e-2  # of the encoder's norm at the start, below which neither it nor the decoder counts as of a size
LEAST_NORM = 1e-3  # of the mean decoder norm, or of the least it counts for: below, a penalty is taken as quadratic
SILENT = 1e-7  # mean size of a latent's contribution, of that of a row, below which a penalty has ended it


def directions_of_worst(residuals: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Unit directions of the residuals of rows drawn with probability proportional to their squared error.

    Args:
        residuals: `x - x_hat` of some rows, (n, D).
        count: how many directions; one may come twice only where there are fewer rows with an error than that.
        generator: on the CPU.

    Returns:
        (count, D); zero where nothing is left to explain.
    """
    scaled = residuals.double() / residuals.abs().max().clamp(min=torch.finfo(residuals.dtype).tiny)
    weights = scaled.square().sum(1).cpu()
    if not weights.any():
        return residuals.new_zeros(count, residuals.shape[1])
    again = int(weights.count_nonzero()) < count
    chosen = scaled[torch.multinomial(weights, count, replacement=again, generator=generator).to(scaled.device)]
    return (chosen / chosen.norm(dim=1, keepdim=True)).to(residuals.dtype)


@torch.no_grad()
def revive(dictionary: Dictionary, dead: Tensor, directions: Tensor) -> None:
    """Aim the encoder of dead latents anew, with the mean norm and the mean parameters of the others.

    Their decoder is right at the next decoder step; until then it is that of a tied latent, or of a free decoder zero.

    Args:
        dictionary: changed in place.
        dead: a mask, (F,), neither empty nor full.
        directions: unit vectors, one for each of them, (m, D).
    """
    def mean_of_others(values: Tensor) -> Tensor:
        return values.masked_fill(dead, 0).sum() / (~dead).sum()

    W_enc = dictionary.W_enc
    W_enc[:, dead] = mean_of_others(W_enc.norm(dim=0)) * directions.T
    dictionary.b_enc.masked_fill_(dead, 0)
    for name, parameter in dictionary.activation_parameters.items():
        if dictionary.latent_dimension(name) is not None:
            parameter.masked_fill_(dead, mean_of_others(parameter))


@torch.no_grad()
def silence(dictionary: Dictionary, norm_weights: Tensor, rows: float) -> bool:
    """Turn off latents whose contribution a penalty has driven to nothing: left to themselves they shrink until nothing
    can be computed with them, and a decoder step without the penalty would bring them back.

    Args:
        dictionary: its encoder is changed in place.
        norm_weights: what the penalty weighs each decoder norm with, a sum over rows, (F,).
        rows: how many.

    Returns:
        Whether there are any.
    """
    W_dec = dictionary.decoder()
    contribution = norm_weights * W_dec.double().norm(dim=1) / rows  # (F,)
    gone = (norm_weights > 0) & (contribution < SILENT * math.sqrt(W_dec.shape[1]))
    dictionary.W_enc.masked_fill_(gone, 0)
    dictionary.b_enc.masked_fill_(gone, 0)
    return bool(gone.any())


def penalty_decay(W_dec: Tensor, weights: Tensor, size: float) -> Tensor:
    """The weight of the quadratic in each `||W_i||` that touches a penalty from above at the decoder as it is, (F,).

    `a ||W|| <= a (||W||^2 / ||W_t|| + ||W_t||) / 2`, so that a step which lowers the right side lowers the left:
    encoder and decoder step then descend on one objective. A decoder step blind to the penalty would undo what
    the encoder step gained, and the two together drive the codes to nothing.

    Args:
        W_dec: the decoder before the step, (F, D).
        weights: the penalty's derivative in each decoder norm, a sum over rows, (F,), float64.
        size: the encoder's norm at the start of training.
    """
    norms = W_dec.double().norm(dim=1)
    mean = max(norms.mean().item(), LEAST_SIZE * size / math.sqrt(len(norms)))
    return weights / (2 * norms.clamp(min=LEAST_NORM * mean))


@torch.no_grad()
def balance(dictionary: Coupled, size: float) -> float | None:
    """Scale the codes so that encoder and decoder are of one size; the decoder is left to be divided by the factor.

    Without it a penalty shrinks the codes a little in each encoder step, the decoder step makes up for it, and after
    some hundred iterations Adam's steps are large against the encoder. Under a penalty that is too strong for any code
    this stops at `LEAST_SIZE`, so that biases can end the codes.

    Args:
        dictionary: its encoder and the activation's parameters are changed in place.
        size: the encoder's norm at the start of training.

    Returns:
        The factor; None where there is none, as with an activation whose codes are of one scale.
    """
    norm = dictionary.W_enc.norm().item()
    tiny = torch.finfo(dictionary.W_enc.dtype).tiny
    square = dictionary.c or dictionary.Delta.norm().item() / max(norm, tiny)
    if not 0 < square < math.inf or not norm:
        return None
    factor = max(math.sqrt(square), LEAST_SIZE * size / norm)
    rescaled = dictionary.activation.rescaled(dictionary.activation_parameters, factor)
    if rescaled is None:
        return None
    dictionary.W_enc.mul_(factor)
    dictionary.b_enc.mul_(factor)
    for name, value in rescaled.items():
        getattr(dictionary, name).copy_(value)
    return factor

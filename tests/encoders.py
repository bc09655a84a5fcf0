"""Random encoders for the tests of geometry, kind and awkward, and a slow certain account of their cells."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from homes import activation_of
from hypothesis import strategies as st

from saecli.sae.activations import AbsTopK, Activation, ReluTopK, Thresholded
from saecli.sae.dictionary import SAE

KINDS = ("relu", "jumprelu", "batchtopk", "topk", "relu-topk", "abs-topk")
SHAPES = ("plain", "shifted", "clustered", "twins", "zeros", "uneven")


def encoder(rng: np.random.Generator, D: int, F: int, shape: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns (D, F) and bias (F,); `shifted` by a large common vector, with equal columns, or of unlike norms."""
    W, b = rng.normal(size=(D, F)), 0.3 * rng.normal(size=F)
    if shape == "shifted":
        W += 30 * rng.normal(size=(D, 1))
    elif shape == "clustered":
        W = rng.normal(size=(D, 3))[:, rng.integers(0, 3, F)] + 1e-3 * W
    elif shape == "twins":
        W[:, F // 2 :] = W[:, : F - F // 2]
    elif shape == "zeros":
        W[:, ::3] = 0
    elif shape == "uneven":
        W *= 10 ** rng.uniform(-2, 2, F)
    return W, b


@dataclass(frozen=True)
class Case:
    """An SAE in float64 and rows for it, (B, D)."""

    sae: SAE
    rows: torch.Tensor


@st.composite
def cases(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = KINDS,
    largest_d_sae: int = 24,
    shapes: tuple[str, ...] = SHAPES,
) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    D, F = draw(st.integers(1, 6)), draw(st.integers(1, largest_d_sae))
    W, b = encoder(rng, D, F, draw(st.sampled_from(shapes)))
    activation = activation_of(draw(st.sampled_from(kinds)), draw(st.integers(1, F)))
    return Case(sae_of(W, b, activation, rng), torch.from_numpy(rng.normal(size=(8, D))))


def sae_of(W: np.ndarray, b: np.ndarray, activation: Activation, rng: np.random.Generator) -> SAE:
    """An SAE with that encoder, thresholds of different sizes where it has any, and a random decoder."""
    D, F = W.shape
    parameters = {
        name: torch.from_numpy(np.asarray(rng.uniform(0, 1, tuple(start.shape))))
        for name, start in activation.parameters(F).items()
    }
    tensors = map(torch.from_numpy, (W, b, rng.normal(size=(F, D)), rng.normal(size=D)))
    return SAE(*tensors, activation, parameters)


def case_of(
    activation: Activation, D: int, F: int, rows: int = 4, shape: str = "plain", seed: int = 0
) -> Case:
    rng = np.random.default_rng(seed)
    sae = sae_of(*encoder(rng, D, F, shape), activation, rng)
    return Case(sae, torch.from_numpy(rng.normal(size=(rows, D))))


def walls(sae: SAE, row: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """Every wall of the row's cell: its distance and the unit vector towards it, pair by pair in plain Python."""
    W, b = sae.W_enc.numpy(), sae.b_enc.numpy()
    v = row @ W + b
    cell_walls = []
    clipped = isinstance(sae.activation, ReluTopK)
    if isinstance(sae.activation, Thresholded) or (clipped and (v > 0).sum() < sae.activation.k):
        learned = sae.activation_parameters
        t = np.broadcast_to(learned["threshold"].numpy() if learned else 0.0, len(b))
        for i in range(len(b)):
            if (norm := np.linalg.norm(W[:, i])) > 0:
                cell_walls.append((abs(v[i] - t[i]) / norm, np.sign(t[i] - v[i]) * W[:, i] / norm))
        return cell_walls
    signed = isinstance(sae.activation, AbsTopK)
    order = np.argsort(-(np.abs(v) if signed else v), kind="stable")
    inside, outside = order[: sae.activation.k], order[sae.activation.k :]
    for i, j, sign in itertools.product(inside, outside, (1, -1) if signed else (1,)):
        own = -1 if signed and v[i] < 0 else 1
        towards = sign * W[:, j] - own * W[:, i]
        if (norm := np.linalg.norm(towards)) > 0:
            cell_walls.append(((own * v[i] - sign * v[j]) / norm, towards / norm))
    for i in inside if clipped else ():
        if (norm := np.linalg.norm(W[:, i])) > 0:
            cell_walls.append((v[i] / norm, -W[:, i] / norm))
    return cell_walls

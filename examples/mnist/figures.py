"""Tables, figures and claims of the MNIST experiments; run by `run.sh`."""

import math
from pathlib import Path

import numpy as np
import torch
from drawn import ablations, curves, sizes
from matplotlib.axes import Axes
from measured import (
    WAYS,
    Run,
    ablation_claims,
    arguments,
    efficiency_claims,
    rows_of,
    runs_of,
    select,
    write_claims,
    write_table,
)

from saecli.show.style import COLOURS, figure

ACTS = {"topk": "TopK, K = 15", "relu": "relu"}
SHORT = {"sgd": "SGD", "paper": "PAM-SGD", "default": "defaults"}
SHOWN = 8  # images, filters


def picture(axes: Axes, pixels: np.ndarray, low: float, high: float, colours: str = "gray") -> None:
    """Draw an image, from its darkest value to its brightest."""
    axes.imshow(pixels.reshape(math.isqrt(len(pixels)), -1), cmap=colours, vmin=low, vmax=high)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def reconstructions(out: Path, first: dict[str, Run], x: torch.Tensor) -> None:
    """Rows of held-out images, and what each way makes of them."""
    black, white = x.min().item(), x.max().item()
    with figure(out / "reconstructions.png", 9, 4.0) as drawn:
        grid = drawn.subplots(1 + len(first), SHOWN)
        rows = {"held out": x[:SHOWN]} | {
            SHORT[way]: run.sae(x[:SHOWN]) for way, run in first.items()
        }
        for panels, (name, images) in zip(grid, rows.items(), strict=True):
            for axes, image in zip(panels, images, strict=True):
                picture(axes, image.numpy(), black, white)
            panels[0].set_ylabel(name, fontsize=9)


def filters(out: Path, first: dict[str, Run], x: torch.Tensor) -> None:
    """Encoder and decoder of the latents that each way uses most on held-out images."""
    with figure(out / "filters.png", 9, 1.15 * 2 * len(first)) as drawn:
        grid = drawn.subplots(2 * len(first), SHOWN)
        for index, (way, run) in enumerate(first.items()):
            used = run.sae.encode(x).abs().mean(0).argsort(descending=True)[:SHOWN]
            for panels, name, weights in (
                (grid[2 * index], "encoder", run.sae.W_enc.T[used]),
                (grid[2 * index + 1], "decoder", run.sae.W_dec[used]),
            ):
                for axes, weight in zip(panels, weights, strict=True):
                    largest = weight.abs().max().item()
                    picture(axes, weight.numpy(), -largest, largest, "RdBu_r")
                panels[0].set_ylabel(f"{SHORT[way]}\n{name}", fontsize=9)


def patterns(out: Path, runs: list[Run], x: torch.Tensor) -> None:
    """Codes of three held-out images, latent by latent."""
    with figure(out / "patterns.png", 10.5, 5.4) as drawn:
        grid = drawn.subplots(3, 4, sharex=True)
        columns = [(act, way) for act in ACTS for way in ("sgd", "paper")]
        for panels, (act, way) in zip(grid.T, columns, strict=True):
            sae = select(runs, group="base", act=act, way=way, seed=0)[0].sae
            for axes, z in zip(panels, sae.encode(x[:3]).numpy(), strict=True):
                active = np.flatnonzero(z)
                axes.vlines(active, 0, z[active], color=COLOURS[list(WAYS).index(way)], linewidth=1)
                axes.axhline(0, color="black", linewidth=0.5)
                axes.set_title(f"{len(active)} active", loc="right", fontsize=8)
            panels[0].set_title(f"{SHORT[way]}, {act}", loc="left")
            panels[-1].set_xlabel("latent")
        for axes in grid[:, 0]:
            axes.set_ylabel("code")


def main() -> None:
    given = arguments(__doc__)
    runs, out = runs_of(given.out), given.out
    x = rows_of(out, "images", "test")
    write_table(out, "runs", runs)
    curves(out, runs, ACTS)
    by_size, by_ablation = sizes(out, runs, ACTS), ablations(out, runs, ACTS)
    first = {way: select(runs, group="base", act="topk", way=way, seed=0)[0] for way in WAYS}
    reconstructions(out, first, x)
    filters(out, {way: first[way] for way in ("sgd", "paper")}, x)
    patterns(out, runs, x)
    claims = efficiency_claims(by_size, ACTS, "On images")
    write_claims(
        out,
        "Images",
        given.command,
        claims + ablation_claims(by_ablation["topk"], "On images, TopK"),
        ["curves.png", "reconstructions.png", "filters.png", "patterns.png"],
    )


if __name__ == "__main__":
    main()

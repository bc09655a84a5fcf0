"""Tables, figures and claims of the MNIST experiments; run by `run.sh`."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import torch
from drawn import KINDS, ablations, curves, sizes, varied
from matplotlib.axes import Axes
from measured import WAYS, Errors, Run, arguments, by_rows, rows_of, runs_of, select, write_table
from verdicts import (
    ROWS,
    Claim,
    Ratio,
    ablation_claims,
    efficiency_claims,
    geometry_claims,
    listed,
    part_verdict,
    printed_geometry,
    ratios,
    sparsity_claims,
    speed_claims,
    verdict,
    write_claims,
)

from saecli.show.style import COLOURS, MARKERS, figure, legend_below

ACTS = {"topk": "TopK, K = 15", "relu": "relu"}
SHORT = {"sgd": "SGD", "paper": "PAM-SGD", "fair": "sgd", "default": "pam-sgd"}
SHOWN = 8  # images, filters
ALWAYS = 0.95  # of the rows
ROBUST = 0.1  # of an error: the change, at most, that leaves it much the same
LABELS = {group: label for group, (label, _) in KINDS.items()} | {"updates": "updates per batch"}


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
        some = x[:: max(1, len(x) // SHOWN)][:SHOWN]  # files may be by digit
        rows = {"held out": some} | {SHORT[way]: run.sae(some) for way, run in first.items()}
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
        columns = [
            (act, way)
            for act in ACTS
            for way in ("sgd", "paper")
            if select(runs, group="base", act=act, way=way)
        ]
        for panels, (act, way) in zip(grid.T, columns, strict=False):
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


def background(run: Run, x: torch.Tensor) -> float:
    """The mean squared error where held-out images are black."""
    error = (run.sae(x) - x).square()
    return error[x == x.min()].mean().item()


def roughness(run: Run, x: torch.Tensor) -> float:
    """The mean square of differences between neighbouring pixels of decoder filters over that of their pixels, of the
    latents that fire on held-out images."""
    used = run.sae.encode(x).ne(0).any(0)
    side = math.isqrt(x.shape[1])
    filters = run.sae.W_dec[used].reshape(-1, side, side)
    differences = [filters.diff(dim=dim).square().mean() for dim in (1, 2)]
    return (sum(differences) / filters.square().mean()).item()


def cleanness_claims(runs: list[Run], x: torch.Tensor) -> list[Claim]:
    """Claims on the pictures: noise in the background of reconstructions, and roughness of filters."""
    words = {
        background: ("reconstructions are cleaner", "error on black pixels", "reconstructions.png"),
        roughness: (
            "filters are smoother",
            "differences of neighbouring pixels in decoder filters",
            "filters.png",
        ),
    }
    claims = []
    for measure, (said, evidence, name) in words.items():
        over: dict[str, Ratio] = {}
        for act, title in ACTS.items():
            by_way: dict[str, Errors] = {
                way: {0: [measure(run, x) for run in select(runs, group="base", act=act, way=way)]}
                for way in ("sgd", "paper")
            }
            if by_way["paper"][0]:
                over |= ratios(by_way["paper"], by_way["sgd"], title)
        if over:
            claims.append(
                Claim(
                    f"On images: PAM-SGD's {said} than SGD's",
                    verdict(over),
                    f"{evidence}, over SGD's: {listed(over)}",
                    name,
                )
            )
    return claims


def frontier(out: Path, runs: list[Run]) -> list[Claim]:
    """Draw relu's test error against its L0, by weight of the L1 penalty; the claim on it.

    sgd's error at an L0 of pam-sgd is on a straight line between its own, in the logarithm of L0.
    """
    found = {
        way: [
            sorted((run.final["test_l0"], run.final["test_fvu"]) for run in of_seed)
            for of_seed in by_seed([run for run in runs if run.group in ("base", "l1")], way)
        ]
        for way in ("fair", "default")
    }
    with figure(out / "frontier.png", 5.5, 3.8) as drawn:
        axes = drawn.subplots()
        for way, lines in found.items():
            index = list(WAYS).index(way)
            for seed, line in enumerate(lines):
                label = SHORT[way] if seed == 0 else None
                axes.plot(
                    *zip(*line, strict=True),
                    MARKERS[index] + "-",
                    color=COLOURS[index],
                    label=label,
                )
        axes.set(xlabel="active latents per row", ylabel="test FVU", title="relu, by weight of L1")
        legend_below(drawn, *axes.get_legend_handles_labels())
    over: dict[str, Ratio] = {}
    for number in range(min(map(len, found["default"]), default=0)):
        ours, theirs, l0s = [], [], []
        for line, other in zip(found["default"], found["fair"], strict=True):
            l0, fvu = line[number]
            if other[0][0] <= l0 <= other[-1][0]:
                logs = [math.log(at) for at, _ in other]
                theirs.append(float(np.interp(math.log(l0), logs, [error for _, error in other])))
                ours.append(fvu)
                l0s.append(l0)
        if len(ours) == len(found["default"]):
            over[f"L0 {statistics.mean(l0s):.0f}"] = Ratio.of(ours, theirs)
    if not over:
        return []
    statement = "On images, relu at equal L0: by this tool's defaults pam-sgd reaches a lower test error than sgd"
    evidence = f"FVU over sgd's, at the L0 of pam-sgd: {listed(over)}"
    return [Claim(statement, verdict(over), evidence, "frontier.png")]


def by_seed(runs: list[Run], way: str) -> list[list[Run]]:
    """relu's runs of a way, a list a seed."""
    some = select(runs, act="relu", way=way)
    seeds = sorted({run.seed for run in some})
    return [select(some, seed=seed) for seed in seeds]


def updates(out: Path) -> dict[str, Errors]:
    """What `updates.py` wrote: test errors by way and updates per batch."""
    path = out / "updates.json"
    lines = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found: dict[str, Errors] = {}
    for line in lines:
        found.setdefault(line["way"], {}).setdefault(line["updates"], []).append(line["test_fvu"])
    return found


def robustness_claims(over: dict[str, Ratio]) -> list[Claim]:
    """The claim on several updates on each batch."""
    pam = {setting: ratio for setting, ratio in over.items() if setting.startswith("PAM")}
    if not pam:
        return []
    same = [setting for setting, ratio in pam.items() if abs(ratio.mean - 1) <= ROBUST]
    return [
        Claim(
            "On images, TopK: PAM-SGD's test error hardly depends on the updates per batch",
            part_verdict(same, pam),
            f"FVU over that of one update per batch, 10 epochs: {listed(over)}",
            "ablations.png",
        )
    ]


def affine_claims(runs: list[Run], x: torch.Tensor) -> list[Claim]:
    """Whether relu's SAEs are affine for the most part: latents that fire on nearly all held-out images."""
    shares = {}
    for way, name in WAYS.items():
        some = select(runs, group="base", act="relu", way=way)
        always = [
            run.sae.encode(x).ne(0).double().mean(0).gt(ALWAYS).double().mean() for run in some
        ]
        if always:
            shares[name] = torch.stack(always).mean().item()
    if not shares:
        return []
    statement = "On images, relu without a penalty: SAEs become affine, most latents firing on nearly all rows"
    mostly = [name for name, share in shares.items() if share > 0.5]
    evidence = f"fraction of latents that fire on over {ALWAYS:.0%} of the rows: {listed(shares, '{:.2f}')}"
    return [Claim(statement, part_verdict(mostly, shares), evidence, "patterns.png")]


CAUSES = {  # ways: those that they vary, what is said, and what the ratio is over
    "ridge": (
        "paper",
        "a chosen ridge lowers PAM-SGD's test error with few rows",
        "with a ridge of 1e-6",
    ),
    "raw": ("default", "rows that are not centred lower pam-sgd's test error", "of centred ones"),
}


def cause_claims(runs: list[Run]) -> list[Claim]:
    """What one change does to a way."""
    claims = []
    for changed, (way, said, what) in CAUSES.items():
        for act, title in ACTS.items():
            ours, theirs = (by_rows(select(runs, act=act, way=name)) for name in (changed, way))
            active, before = (
                by_rows(select(runs, act=act, way=name), "test_l0") for name in (changed, way)
            )
            over = ratios(ours, theirs, ROWS)
            if over:
                claims.append(
                    Claim(
                        f"On images, {title}: {said}",
                        verdict(over),
                        f"FVU over that {what}: {listed(over)}. Active latents: "
                        f"{listed(ratios(active, before, ROWS))}",
                        "sizes.png",
                    )
                )
    return claims


def text_claims(runs: list[Run]) -> list[Claim]:
    """TopK as the paper's text has it, by the K largest, beside the largest in magnitude of its code."""
    errors_of = {
        group: {
            way: {
                0: [run.final["test_fvu"] for run in select(runs, group=group, act="topk", way=way)]
            }
            for way in ("sgd", "paper")
        }
        for group in ("text", "base")
    }
    over: dict[str, Ratio] = {}
    for way in ("sgd", "paper"):
        if errors_of["text"][way][0]:
            over |= ratios(errors_of["text"][way], errors_of["base"][way], SHORT[way])
    if not over:
        return []
    return [
        Claim(
            "On images: the K largest codes, as in the paper's text, give a lower test error than the K largest in "
            "magnitude, as in its code",
            verdict(over),
            f"FVU over that by magnitude: {listed(over)}",
            "curves.png",
        )
    ]


def main() -> None:
    given = arguments(__doc__)
    runs, out = runs_of(given.out), given.out
    x = rows_of(out, "images", "test")
    write_table(out, "runs", runs)
    curves(out, runs, ACTS)
    by_size = sizes(out, runs, ACTS)
    found = varied(runs)
    repeated = updates(out)
    if repeated:
        found["updates"] = repeated
    over = ablations(out, found, LABELS)
    base = {way: select(runs, group="base", act="topk", way=way, seed=0) for way in WAYS}
    first = {way: some[0] for way, some in base.items() if some}
    reconstructions(out, first, x)
    filters(out, {way: run for way, run in first.items() if way in ("sgd", "paper")}, x)
    patterns(out, runs, x)
    repeats = over.pop("updates", {})
    claims = [
        *efficiency_claims(by_size, ACTS, "On images"),
        *frontier(out, runs),
        *speed_claims(runs, ACTS, "On images"),
        *sparsity_claims(runs, "On images", "patterns.png"),
        *affine_claims(runs, x),
        *cleanness_claims(runs, x),
        *robustness_claims(repeats),
        *ablation_claims(over, "On images, TopK"),
        *geometry_claims(printed_geometry(out), ", on images", "curves.png", "curves.png"),
        *cause_claims(runs),
        *text_claims(runs),
    ]
    figures = ["curves.png", "reconstructions.png", "filters.png", "patterns.png"]
    write_claims(out, "Images", given.command, claims, figures)


if __name__ == "__main__":
    main()

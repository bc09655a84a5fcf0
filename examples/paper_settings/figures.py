"""What the peak, small K and the gap to SGD come from; run by `run.sh`."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from drawn import plot_errors
from measured import (
    Errors,
    Run,
    arguments,
    errors,
    means,
    rows_of,
    runs_of,
    select,
    write_table,
)
from verdicts import LEVEL, ROWS, Claim, listed, ratios, verdict, write_claims

from saecli.sae.codes import Codes
from saecli.show.style import COLOURS, MARKERS, figure, legend_below, log_scale
from saecli.train.ridge import Sums, Terms, choose_alpha, optimal_decoder

WAYS = {"paper": "the paper's settings", "ridge": "the same with a chosen ridge"}
RIDGES = {
    "none": "no ridge",
    "often": "a ridge on the half of the latents that fire most",
    "rare": "on the half that fire least",
    "all": "on all",
}
PAPER_ALPHA = 1e-10
DIVERGED = 1.5  # times the error with a ridge: more counts as divergence
GAP = {
    "sgd": "SGD as in the paper: tied, L1 0.01",
    "tied": "SGD, tied",
    "untied": "SGD, untied",
    "fairtied": "SGD, tied, the tool's learning rate",
    "fairuntied": "SGD, untied, the tool's learning rate",
    "paper": "PAM-SGD as in the paper",
    "default": "PAM-SGD, the tool's defaults",
}


def peaks(out: Path, runs: list[Run], widths: list[int]) -> dict[str, dict[int, Errors]]:
    """Draw the test error against rows, for each width; returns it by way and width."""
    found = {
        way: {width: errors(select(runs, group=f"peak{width}", way=way)) for width in widths}
        for way in WAYS
    }
    with figure(out / "peaks.png", 9, 3.6) as drawn:
        panels = drawn.subplots(1, 2, sharey=True)
        for axes, (way, title) in zip(panels, WAYS.items(), strict=True):
            plot_errors(
                axes,
                found[way],
                "training rows",
                labels={width: f"d_sae {width}" for width in widths},
            )
            axes.set_title(title)
            for width, colour in zip(widths, COLOURS, strict=False):
                axes.axvline(width, color=colour, linestyle=":", linewidth=1)
        panels[0].set_ylabel("test FVU")
        legend_below(drawn, *panels[0].get_legend_handles_labels())
    return found


def solved_again(run: Run, train: torch.Tensor, test: torch.Tensor) -> dict[str, float]:
    """The held-out error of a run's encoder with the best decoder for it, by which latents' share of it has a ridge.

    The ridge is chosen by leave-one-out for all of them; then it is left to the half of the latents that fire on fewest
    training rows, to the other half, and to none. Rows are standardised, as in training.
    """
    sae = run.sae.copy_to(torch.float64)
    mean, scale = train.mean(0), train.std(0, correction=0).clamp(min=1e-6)
    z, x = sae.encode(train), (train - mean) / scale
    system = Sums(sae.d_sae, sae.d_in)
    system.add(Codes(z), x)
    fired = (z != 0).sum(0)
    rare = (fired <= fired[fired > 0].median()).double()
    bare = Terms(W_t=torch.zeros_like(sae.W_dec), b_t=torch.zeros_like(mean), alpha=0.0)
    alpha = choose_alpha(system, bare, z, x, None).alpha
    decays = {
        "none": torch.zeros_like(rare),
        "often": alpha * (1 - rare),
        "rare": alpha * rare,
        "all": torch.full_like(rare, alpha),
    }
    found = {}
    for name, decay in decays.items():
        decoder = optimal_decoder(system, replace(bare, alpha=PAPER_ALPHA, decay=decay))
        x_hat = (sae.encode(test) @ decoder.W(None) + decoder.b) * scale + mean
        found[name] = ((x_hat - test).square().sum() / (test - test.mean(0)).square().sum()).item()
    return found


def small_k(out: Path, runs: list[Run], width: int) -> dict[str, Errors]:
    """Draw the test error against K, by which latents have a ridge; returns it."""
    swept = select(runs, group="k")
    swept += [
        replace(run, value=run.document["activation"]["k"])
        for run in select(runs, group=f"peak{width}", way="paper")
        if run.value == max(run.value for run in select(runs, group=f"peak{width}"))
    ]
    test = rows_of(out, "activations", "test").double()
    found: dict[str, Errors] = {name: {} for name in RIDGES}
    for run in sorted(swept, key=lambda run: run.value):
        train = rows_of(out, "activations", "train", run.document["training"]["fraction"]).double()
        for name, fvu in solved_again(run, train, test).items():
            found[name].setdefault(run.value, []).append(fvu)
    with figure(out / "small_k.png", 5.5, 3.8) as drawn:
        axes = drawn.subplots()
        plot_errors(axes, found, "K", labels=RIDGES)
        axes.set_ylabel("test FVU")
        legend_below(drawn, *axes.get_legend_handles_labels())
    return found


def gaps(out: Path, runs: list[Run]) -> dict[str, dict[str, Errors]]:
    """Draw the test error of SGD's parts and of PAM-SGD side by side; returns it by activation and way."""
    found = {
        act: {
            way: errors(select(runs, group="gap", act=act, way=way))
            for way in GAP
            if select(runs, group="gap", act=act, way=way)
        }
        for act in ("topk", "relu")
    }
    with figure(out / "gap.png", 10, 3.6) as drawn:
        panels = drawn.subplots(1, 2, sharey=True)
        for axes, (act, ways) in zip(panels, found.items(), strict=True):
            rows = list(next(iter(ways.values())))
            for index, value in enumerate(rows):
                for way, by_rows in ways.items():
                    at = list(GAP).index(way) + 0.18 * (index - (len(rows) - 1) / 2)
                    axes.plot(
                        by_rows[value],
                        [at] * len(by_rows[value]),
                        MARKERS[index],
                        color=COLOURS[index],
                        fillstyle="none",
                        label=f"{value:g} rows" if way == "paper" else None,
                    )
            log_scale(axes, "x")
            axes.set(title=act, xlabel="test FVU", yticks=range(len(GAP)))
            axes.set_yticklabels(GAP.values())
        panels[0].invert_yaxis()
        legend_below(drawn, *panels[0].get_legend_handles_labels())
    return found


def fair(ways: Mapping[str, Errors]) -> Errors:
    """The errors of the better of tied and untied SGD at the tool's learning rate, for each number of rows."""
    tied, untied = ways["fairtied"], ways["fairuntied"]
    return {value: min(tied[value], untied[value], key=statistics.mean) for value in tied}


def claims_of(
    found: dict[str, dict[int, Errors]],
    by_k: dict[str, Errors],
    by_way: dict[str, dict[str, Errors]],
) -> list[Claim]:
    """What the three experiments say."""
    tops = {
        width: max(means(by_rows), key=means(by_rows).__getitem__)
        for width, by_rows in found["paper"].items()
    }
    heights = {
        f"d_sae {width}": max(means(by_rows).values()) / means(by_rows)[max(by_rows)]
        for width, by_rows in found["paper"].items()
    }
    flat = {
        f"d_sae {width}": max(means(by_rows)[rows] for rows in by_rows if rows >= min(by_rows))
        / means(by_rows)[min(by_rows)]
        for width, by_rows in found["ridge"].items()
    }
    moves = (
        all(0.5 <= top / width <= 2 for width, top in tops.items()) and min(heights.values()) > 2
    )
    claims = [
        Claim(
            "The peak at 45% of the rows is where rows and latents are equal in number: it moves with d_sae",
            "holds" if moves else "does not hold",
            "largest FVU at "
            + "; ".join(f"{top:g} rows with d_sae {width}" for width, top in tops.items())
            + f"; over the FVU at all rows, {listed(heights, '{:.3g}')}",
            "peaks.png",
        ),
        Claim(
            "The peak vanishes with a ridge chosen by leave-one-out",
            "holds" if max(flat.values()) <= 1 + LEVEL else "does not hold",
            f"largest FVU over the FVU with fewest rows, {listed(flat, '{:.3g}')}",
            "peaks.png",
        ),
    ]
    none, often, rare, chosen = (means(by_k[name]) for name in RIDGES)
    diverged = {k: fvu for k, fvu in none.items() if fvu > DIVERGED * chosen[k]}
    mended = {k: math.log(none[k] / rare[k]) / math.log(none[k] / chosen[k]) for k in diverged}
    spared = {k: math.log(none[k] / often[k]) / math.log(none[k] / chosen[k]) for k in diverged}
    claims.append(
        Claim(
            "Where K is small PAM-SGD diverges because of rarely active latents, not of K itself",
            "holds"
            if diverged and all(mended[k] > 0.5 > spared[k] for k in diverged)
            else "does not hold"
            if diverged
            else "no K diverged",
            "FVU by K without a ridge, with one on the latents that fire least, on those that fire most, "
            "on all: "
            + "; ".join(
                f"K = {k:g}: {none[k]:.3g}, {rare[k]:.3g}, {often[k]:.3g}, {chosen[k]:.3g}"
                for k in none
            ),
            "small_k.png",
        )
    )
    relu = by_way["relu"]
    lowered = ratios(relu["tied"], relu["sgd"], ROWS)
    claims.append(
        Claim(
            "The gap to SGD with relu comes in part from the baseline's L1, 1,000 times larger",
            verdict(lowered),
            f"FVU of SGD with PAM-SGD's L1 over that with its own: "
            f"{listed(lowered)}; of PAM-SGD over the latter: "
            f"{listed(ratios(relu['paper'], relu['sgd'], ROWS))}",
            "gap.png",
        )
    )
    for act, found_act in by_way.items():
        untied = ratios(found_act["untied"], found_act["tied"], ROWS)
        claims.append(
            Claim(
                f"The gap to SGD comes in part from the baseline's tied decoder, {act}",
                verdict(untied),
                f"FVU of SGD untied over tied: {listed(untied)}",
                "gap.png",
            )
        )
    for way, words in (("paper", "as in the paper"), ("default", "by the tool's defaults")):
        for act in ("topk", "relu"):
            over = ratios(by_way[act][way], fair(by_way[act]), ROWS)
            claims.append(
                Claim(
                    f"PAM-SGD {words} reaches a lower test error than a fair SGD, {act}",
                    verdict(over),
                    f"FVU over the better of tied and untied SGD at the tool's learning rate: "
                    f"{listed(over)}",
                    "gap.png",
                )
            )
    return claims


def main() -> None:
    given = arguments(__doc__)
    out = given.out
    runs = [
        run if run.group == "k" else replace(run, value=run.document["result"]["rows_train"])
        for run in runs_of(out)
    ]
    widths = sorted(
        {int(run.group.removeprefix("peak")) for run in runs if run.group.startswith("peak")}
    )
    write_table(out, "runs", runs)
    found, by_k, by_way = peaks(out, runs, widths), small_k(out, runs, widths[-1]), gaps(out, runs)
    write_claims(out, "The paper's settings", given.command, claims_of(found, by_k, by_way))


if __name__ == "__main__":
    main()

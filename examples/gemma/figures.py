"""Tables, figures and claims of the experiments on a language model; run by `run.sh`."""

from pathlib import Path

from drawn import KINDS, ablations, curves, plot_errors, sizes
from measured import (
    FRACTION,
    WAYS,
    Claim,
    Errors,
    Run,
    ablation_claims,
    arguments,
    efficiency_claims,
    errors,
    listed,
    means,
    ratios,
    runs_of,
    select,
    verdict,
    with_base,
    write_claims,
    write_table,
)

from saecli.show.style import COLOURS, figure, legend_below, log_scale

KINDS_HERE = KINDS | {
    "proximal": ("mu and nu, encoder", 0.001)
}  # the paper's code has them from the start


def shares_of_latents(out: Path, runs: list[Run]) -> dict[str, dict[str, Errors]]:
    """Test error against K, and the density of relu's codes against the share of the rows."""
    found = {
        "k": {way: errors(k_runs(runs, way)) for way in WAYS},
        "density": {
            way: density(with_base(select(runs, act="relu", way=way), "size", 1)) for way in WAYS
        },
    }
    with figure(out / "k_and_density.png", 9, 3.4) as drawn:
        left, right = drawn.subplots(1, 2)
        plot_errors(left, found["k"], "K")
        left.set(title="TopK", ylabel="test FVU")
        plot_errors(right, found["density"], "fraction of the training rows")
        right.set(title="relu", ylabel="fraction of latents active per row")
        legend_below(drawn, *left.get_legend_handles_labels())
    return found


def k_runs(runs: list[Run], way: str) -> list[Run]:
    """The sweep of K, what it varies from included."""
    base = select(runs, group="base", act="topk", way=way)
    k = base[0].document["activation"]["k"]
    return with_base(select(runs, act="topk", way=way), "k", k)


def density(runs: list[Run]) -> Errors:
    """The share of latents that are active on a held-out row, by value."""
    found = errors(runs, "test_l0")
    d_sae = runs[0].document["training"]["d_sae"]
    return {value: [l0 / d_sae for l0 in seeds] for value, seeds in found.items()}


def frontier(out: Path, runs: list[Run]) -> None:
    """Density and test error of relu at each share of the rows."""
    with figure(out / "frontier.png", 5.5, 3.8) as drawn:
        axes = drawn.subplots()
        for index, way in enumerate(WAYS):
            some = with_base(select(runs, act="relu", way=way), "size", 1)
            dense, error = means(density(some)), means(errors(some))
            line = axes.plot(
                dense.values(),
                error.values(),
                "os^"[index] + "-",
                label=WAYS[way],
                color=COLOURS[index],
            )[0]
            for value in dense:
                axes.annotate(
                    f"{value:.0%}",
                    (dense[value], error[value]),
                    xytext=(5, -11),
                    textcoords="offset points",
                    fontsize=8,
                    color=line.get_color(),
                )
        axes.set(
            xlabel="fraction of latents active per row",
            ylabel="test FVU",
            title="relu, by fraction of the rows",
        )
        log_scale(axes, "x")
        log_scale(axes, "y")
        legend_below(drawn, *axes.get_legend_handles_labels())


def main() -> None:
    given = arguments(__doc__)
    runs, out = runs_of(given.out), given.out
    k = select(runs, group="base", act="topk")[0].document["activation"]["k"]
    acts = {"topk": f"TopK, K = {k}", "relu": "relu with L1"}
    write_table(out, "runs", runs)
    curves(out, runs, acts)
    by_size, by_ablation = sizes(out, runs, acts), ablations(out, runs, acts, KINDS_HERE)
    by_k = shares_of_latents(out, runs)
    frontier(out, runs)
    claims = efficiency_claims(by_size, acts, "On activations")
    peak = means(by_size["topk"]["paper"])
    ends, highest = [peak[min(peak)], peak[max(peak)]], max(peak, key=peak.__getitem__)
    claims.append(
        Claim(
            "PAM-SGD's test error peaks at 45% of the rows, TopK",
            "holds" if peak[highest] > 2 * max(ends) and highest == 0.45 else "does not hold",
            f"FVU with {listed({FRACTION.format(value): fvu for value, fvu in peak.items()})}",
            "sizes.png",
        )
    )
    over_k = ratios(by_k["k"]["paper"], by_k["k"]["sgd"], "K = {:g}")
    worse = [k for k in over_k if over_k[k] > 1.25 * list(over_k.values())[-1]]
    claims.append(
        Claim(
            "PAM-SGD does worse against SGD the smaller K is",
            "holds"
            if len(worse) == len(over_k) - 1
            else f"holds when: {'; '.join(worse)}"
            if worse
            else "does not hold",
            f"FVU over SGD's: {listed(over_k)}. Of the tool's defaults: "
            f"{listed(ratios(by_k['k']['default'], by_k['k']['sgd'], 'K = {:g}'))}",
            "k_and_density.png",
        )
    )
    dense, tools = (
        ratios(by_k["density"][way], by_k["density"]["sgd"], FRACTION)
        for way in ("paper", "default")
    )
    claims.append(
        Claim(
            "PAM-SGD's codes are sparser than SGD's, relu",
            verdict(dense),
            f"active latents over SGD's: {listed(dense)}. Of the tool's defaults: {listed(tools)}. All at "
            "other errors, which the figure shows",
            "frontier.png",
        )
    )
    write_claims(
        out,
        "Language model",
        given.command,
        claims + ablation_claims(by_ablation["topk"], "On activations, TopK"),
        ["curves.png"],
    )


if __name__ == "__main__":
    main()

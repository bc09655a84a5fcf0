"""Tables, figures and claims of the paper's own width; run by `run.sh`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from drawn import curves
from measured import (
    WAYS,
    Errors,
    Run,
    arguments,
    base_settings,
    errors,
    runs_of,
    select,
    with_base,
    write_table,
)
from verdicts import (
    RACES,
    Claim,
    efficiency_claims,
    geometry_claims,
    listed,
    printed_geometry,
    ratios,
    speed_claims,
    verdict,
    write_claims,
)

from saecli.show.style import COLOURS, MARKERS, figure, legend_below, log_scale

SETTING = {"topk": "K = {:g}", "relu": "relu"}  # names of values in claims


def widths(out: Path, found: Mapping[str, Mapping[str, Errors]]) -> None:
    """Draw the test error of each setting and way, a point per seed."""
    with figure(out / "widths.png", 6, 3.6) as drawn:
        axes = drawn.subplots()
        names: list[str] = []
        for index, way in enumerate(WAYS):
            for act, by_way in found.items():
                for value, seeds in by_way[way].items():
                    name = SETTING[act].format(value)
                    if name not in names:
                        names.append(name)
                    at = names.index(name) + 0.16 * (index - 1.5)
                    axes.plot([at] * len(seeds), seeds, MARKERS[index], color=COLOURS[index])
            axes.plot([], [], MARKERS[index], color=COLOURS[index], label=WAYS[way])
        axes.set_xticks(range(len(names)), names)
        axes.set(xlim=(-0.5, len(names) - 0.5), ylabel="test FVU")
        log_scale(axes, "y")
        legend_below(drawn, *axes.get_legend_handles_labels())


def signed_claims(runs: Sequence[Run], where: str) -> list[Claim]:
    """The claim on what the paper's code selects codes by; none where that was not trained."""
    signed = select(runs, group="signed")
    seeds = {run.seed for run in signed}
    plain = [run for run in select(runs, group="k", way="default") if run.seed in seeds]
    over = ratios(errors(signed), errors(plain), SETTING["topk"])
    if not over:
        return []
    statement = (
        f"{where}, TopK: the K largest codes in magnitude, as in the paper's code, give pam-sgd a lower test error "
        "than the K largest"
    )
    evidence = f"FVU over that by size: {listed(over)}"
    return [Claim(statement, verdict(over), evidence, "widths.png")]


def main() -> None:
    given = arguments(__doc__)
    runs, out = runs_of(given.out), given.out
    k, d_sae, acts = base_settings(runs)
    topk = with_base(select(runs, act="topk"), "k", k)
    found = {
        "topk": {way: errors(select(topk, way=way)) for way in WAYS},
        "relu": {way: errors(select(runs, act="relu", way=way)) for way in WAYS},
    }
    write_table(out, "runs", runs)
    curves(out, runs, acts)
    widths(out, found)
    where = f"With {d_sae:,} latents"
    claims = []
    for act, words, ours, theirs in (
        ("topk", "TopK: PAM-SGD is behind SGD", "sgd", "paper"),
        ("relu", "relu with L1: PAM-SGD is ahead of SGD", "paper", "sgd"),
    ):
        over = ratios(found[act]["paper"], found[act]["sgd"], SETTING[act])
        lower = ratios(found[act][ours], found[act][theirs], SETTING[act])
        if over:
            evidence = f"FVU over SGD's, on all rows: {listed(over)}"
            claims.append(Claim(f"{where}, {words}", verdict(lower), evidence, "widths.png"))
    for act, form in SETTING.items():
        title = {act: "TopK" if act == "topk" else acts[act]}
        claims += efficiency_claims(found, title, where, RACES[1:], form, "widths.png")
    claims += signed_claims(runs, where)
    claims += speed_claims(runs, acts, where)
    place = f", with {d_sae:,} latents"
    claims += geometry_claims(printed_geometry(out), place, "curves.png", "curves.png")
    write_claims(out, "The paper's width", given.command, claims)


if __name__ == "__main__":
    main()

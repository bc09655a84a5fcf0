"""What latents do to a model: the tables, and the picture of effects by dose."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import RenderableType

from ..base.words import counted
from ..measure.effects import ALIKE, NOTHING
from ..measure.trials import SIGNS
from ..store.origin import point_words
from .measures import labelled
from .style import colour, figure, legend_below, marker, short
from .tables import JsonObject, table

CHANGED = tuple(SIGNS)
COMPARED_FLOORS = ("random", "other latent", "error")  # of those that KL compares
PROMOTED_LISTED = 2  # tokens
CURVES, ABREAST = 12, 4  # latents drawn at most, and in a row
VERDICTS = {ALIKE: "like any", NOTHING: "nothing"}  # in a table


def effects_tables(document: JsonObject, top: int, named: bool) -> list[RenderableType]:
    """The `top` latents by p, over their strongest floors; of `named` ones all floors; and how many act."""
    latents = sorted(document["latents"], key=lambda line: min(line[name]["p"] for name in CHANGED))
    where = point_words(
        *(document.get(f"target_{name}", document[name]) for name in ("layer", "site"))
    )
    title = (
        f"latents of {document['run']} removed where they fire and added where they are silent, in "
        f"{document['model']}, {where}: KL of the next token (nats), over the strongest floor of the same norm"
    )
    heads = [head for name in CHANGED for head in (f"KL, {name}", "over floor")]
    rows = [
        [
            labelled(line["latent"], line["label"]),
            " ".join(line["tokens"][:PROMOTED_LISTED]),
            *(cell for name in CHANGED for cell in _over_strongest(line[name])),
            VERDICTS.get(line["verdict"], line["verdict"]),
        ]
        for line in latents[:top]
    ]
    shown = [table(title, ["latent", "promotes", *heads, "verdict"], rows)]
    if named:
        shown.append(_floors_table(latents))
    verdicts = Counter(line["verdict"] for line in latents)
    counts = "; ".join(f"{count:,} {verdict}" for verdict, count in verdicts.most_common())
    of = counted(len(latents), "latent")
    return [*shown, f"of {of}, at a false discovery rate of {document['fdr']:g}: {counts}"]


def _over_strongest(condition: JsonObject) -> list[float | str]:
    floors = condition["floors"]
    name = min(COMPARED_FLOORS, key=lambda floor: floors[floor]["ratio"])
    return [condition["kl"], f"{_ratio(floors[name])} {name}"]


def _ratio(measures: JsonObject) -> str:
    return "{ratio:.2f} ({ratio_low:.2f}-{ratio_high:.2f})".format(**measures)


def _floors_table(latents: Sequence[JsonObject]) -> RenderableType:
    """A line per latent and condition: what the change does over each floor."""
    rows = []
    for line in latents:
        for name in CHANGED:
            condition = line[name]
            ratios = [*condition["floors"].values(), condition["elsewhere"]]
            measures = [condition[measure] for measure in ("promoted", "p", "q")]
            rows.append([f"{line['latent']} {name}", *map(_ratio, ratios), *measures])
    floors = latents[0]["removed"]["floors"]
    title = "effect over each floor, with 95% intervals over documents; promoted: rise of its tokens' log-probability"
    return table(title, ["change", *floors, "elsewhere", "promoted", "p", "q"], rows)


def draw_doses(path: Path | None, document: JsonObject) -> Figure:
    """Draw the effect of adding each of the first latents by dose, and of floors at dose 1."""
    latents = document["latents"][:CURVES]
    rows, columns = math.ceil(len(latents) / ABREAST), min(len(latents), ABREAST)
    own, floors = {"color": colour(0), "marker": "o"}, dict(enumerate(COMPARED_FLOORS, 1))
    styles: dict[int, dict[str, Any]] = {
        index: {"color": colour(index), "marker": marker(index), "linestyle": "none"}
        for index in floors
    }
    with figure(path, 2.4 * columns + 1, 2.4 * rows + 0.4) as drawn:
        every_axes = drawn.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes, line in zip(every_axes.flat, latents, strict=False):
            added = line["added"]
            ends = ("kl_low", "kl", "kl_high")
            low, kl, high = np.array([[each[end] for end in ends] for each in added["doses"]]).T
            doses = [each["dose"] for each in added["doses"]]
            curve = axes.errorbar(doses, kl, [kl - low, high - kl], **own)
            points = [
                # Aside, so that they do not hide each other.
                axes.plot(1.1**index, added["floors"][name]["kl"], **styles[index])[0]
                for index, name in floors.items()
            ]
            title = short(labelled(line["latent"], line["label"]))
            axes.set(xscale="log", yscale="log", title=title)
            axes.set_xticks(doses, [f"{dose:g}" for dose in doses])
            axes.minorticks_off()
        for axes in every_axes.flat[len(latents) :]:
            axes.set_visible(False)
        for axes in every_axes[-1]:
            axes.set_xlabel("dose, mean codes")
        drawn.supylabel("KL of the next token, nats", fontsize=10)
        legend_below(drawn, [curve, *points], ["added where it is silent", *floors.values()])
    return drawn

"""Draw what `real.py` printed: FVU and KL against L0, a line for each trainer.

    python tests/benchmarks/real_picture.py LINES.jsonl OUT.png

Of SAELens, at each L0 asked for, the learning rate of the least FVU.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import typer

from saecli.show.style import figure, legend_below, line_style, log_scale, marker

MEASURES = {"fvu": "FVU", "kl": "KL, nats"}
WORDS = {"sgd": "saecli, sgd", "pam-sgd": "saecli, pam-sgd"}


def main(lines: Path, out: Path) -> None:
    """Read, choose, draw."""
    trainers: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in map(json.loads, lines.read_text(encoding="utf-8").splitlines()):
        if "saelens" in line:
            act, asked = line["saelens"].split("-")
            name = f"SAELens, {act}"
        else:
            act, asked = line["act"], str(line["asked"])
            name = f"{WORDS[line['solver']]}, {act}"
        before = trainers[name].get(asked)
        if before is None or line["fvu"] < before["fvu"]:
            trainers[name][asked] = line
    with figure(out, 7.2, 3.2) as drawn:
        panels = drawn.subplots(1, 2)
        for number, (name, by_l0) in enumerate(trainers.items()):
            points = sorted(by_l0.values(), key=lambda line: line["l0"])
            l0s = [line["l0"] for line in points]
            for axes, (measure, label) in zip(panels, MEASURES.items(), strict=True):
                values = [line[measure] for line in points]
                style = line_style(number) | {"marker": marker(number), "label": name}
                axes.plot(l0s, values, **style)
                axes.set(xlabel="held-out L0", ylabel=label)
        for axes in panels:
            log_scale(axes, "x")
            log_scale(axes, "y")
        legend_below(drawn, *panels[0].get_legend_handles_labels())


if __name__ == "__main__":
    typer.run(main)

"""Every claim of the paper with its verdict: REPORT.md, from the folders that the sections wrote.

    python examples/report.py results/mnist results/gemma [--out DIR]

Replaces these sections of the report and leaves its others. Copies the figures behind claims, made smaller, to
`figures/` next to the report, and writes the number of verdicts of each section into the README there, between its
markers. Of images and the language model together it draws `figures/rows.png`: test error against training rows.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drawn import by_solver
from PIL import Image

BEGIN, END = "<!-- results -->", "<!-- end -->"
WIDTH, HUES = 1200, 48  # of copied figures: pixels, and colours
HEAD = """# The paper's claims, their causes, and verdicts

Written by `examples/report.py` from the measurements of this folder's scripts, not by hand. Errors are the fraction of
variance unexplained (FVU) of held-out rows. "Lower" means by more than 2%, and by the whole 95% interval over seeds,
which is given after each mean where there are several. Statements are paraphrased; those on causes are added here. A
verdict is about the experiment above it, at its sizes.
"""
ROWS = {"Images": "MNIST, TopK", "Language model": "Gemma 3 270M, layer 12, TopK"}  # in `rows.png`
VERDICTS = {"holds": "holds", "holds when": "holds in part", "does not hold": "does not hold"}
ORDER = (
    "Images",
    "Language model",
    "The paper's width",
    "The paper's settings",
    "Convergence",
    "Geometry",
)

Section = dict[str, Any]  # as of `write_claims` in measured.py


def section(found: Section, folder: Path, figures: Path) -> str:
    """A section's claims as a table, its figures copied.

    Args:
        found: its `claims.json`.
        folder: what its script wrote.
        figures: where its figures go.
    """
    lines = [
        f"## {found['section']}",
        "",
        f"    {found['command']}",
        "",
        "| statement | verdict | figures behind it |",
        "|---|---|---|",
    ]
    stem = found["section"].lower().replace(" ", "-").replace("'", "")
    names = dict.fromkeys([*(claim["figure"] for claim in found["claims"]), *found["also"]])
    for name in names:
        shrunk(folder / name, figures / f"{stem}-{name}")
    for claim in found["claims"]:  # by weight
        link = f"[{Path(claim['figure']).stem}]({figures.name}/{stem}-{claim['figure']})"
        lines.append(
            f"| {claim['statement']} | **{claim['verdict']}** | {link}: {claim['evidence']} |"
        )
    pictures = [f"![{Path(name).stem}]({figures.name}/{stem}-{name})" for name in names]
    return "\n".join([*lines, "", *"\n\n".join(pictures).splitlines(), ""])


def shrunk(figure: Path, to: Path) -> None:
    """Copy a figure in a size that a repository may hold."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(figure) as image:
        image.thumbnail((WIDTH, WIDTH))
        image.convert("RGB").quantize(HUES, dither=Image.Dither.NONE).save(to, optimize=True)


def written(report: str) -> dict[str, str]:
    """The sections of a report, by their titles."""
    sections = re.split(r"^(?=## )", report, flags=re.MULTILINE)[1:]
    return {text.partition("\n")[0].removeprefix("## "): text for text in sections}


def verdicts(sections: Mapping[str, str]) -> str:
    """The number of verdicts of each kind, by section."""
    lines = [f"| | {' | '.join(VERDICTS.values())} |", "|---" * (1 + len(VERDICTS)) + "|"]
    for name, text in sections.items():
        kinds = [
            verdict.split(":")[0]
            for verdict in re.findall(r"^\|.*?\| \*\*(.*?)\*\* \|", text, re.M)
        ]
        anchor = name.lower().replace(" ", "-").replace("'", "")
        counts = " | ".join(str(kinds.count(one)) for one in VERDICTS)
        lines.append(f"| [{name}](REPORT.md#{anchor}) | {counts} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "results", type=Path, nargs="+", help="folders that the sections' scripts wrote"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder of REPORT.md and figures/"
    )
    given = parser.parse_args()
    missing = [str(folder) for folder in given.results if not (folder / "claims.json").exists()]
    if missing:
        parser.error(
            f"expected claims.json in each folder, found none in {', '.join(missing)}; run the section's "
            "run.sh to its end"
        )
    sections = [
        json.loads((folder / "claims.json").read_text(encoding="utf-8")) for folder in given.results
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    by_name = dict(zip((found["section"] for found in sections), given.results, strict=True))
    if {*ROWS} <= by_name.keys():
        by_solver(given.out / "figures" / "rows.png", {ROWS[name]: by_name[name] for name in ROWS})
    report = given.out / "REPORT.md"
    parts = written(report.read_text(encoding="utf-8")) if report.exists() else {}
    for found, folder in zip(sections, given.results, strict=True):
        parts[found["section"]] = section(found, folder, given.out / "figures")
    ordered = {name: parts[name].rstrip() + "\n" for name in ORDER if name in parts}
    report.write_text("\n".join([HEAD, *ordered.values()]), encoding="utf-8")
    readme = given.out / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        block = f"{BEGIN}\n{verdicts(ordered)}\n{END}"
        readme.write_text(
            re.sub(f"{BEGIN}.*{END}", lambda _: block, text, flags=re.DOTALL), encoding="utf-8"
        )
    print(f"wrote {report}")


if __name__ == "__main__":
    main()

"""How `sae geometry` shows its document to people."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..base.tables import table
from ..base.wording import counted, number


def _middle(measures: dict[str, Any]) -> str:
    return f"5% to 95%: {number(measures['p5'])} to {number(measures['p95'])}"


def disagreement(diagram: dict[str, Any] | None) -> str | None:
    """On how many rows, out of how many, the power diagram disagrees with the SAE's cells; None where on none."""
    for compared in (diagram, diagram["own_sites"]) if diagram else ():
        decided = compared["rows"] - compared["ties"]
        if decided and compared["agreement"] < 1:
            return f"on {decided - round(compared['agreement'] * decided):,} of {counted(decided, 'row')}"
    return None


def _diagram(diagram: dict[str, Any] | None) -> list[list[Any]]:
    """Whether rows lie in their power cells, which is a theorem; nothing for an activation without a power diagram."""
    if diagram is None:
        return []
    if where := disagreement(diagram):
        return [["power diagram", Text("disagrees", style="bold red"), Text(where, style="bold red")]]
    decided, ties = diagram["rows"] - diagram["ties"], counted(diagram["ties"], "tie")
    if not decided:
        return [["power diagram", None, f"no row but {ties}"]]
    return [["power diagram", "agrees",
             f"on {counted(decided, 'row')}{f'; {ties} left out' if diagram['ties'] else ''}"]]


def _cells(document: dict[str, Any]) -> list[list[Any]]:
    """Cells and latents."""
    occupancy, rank, bad = document["occupancy"], document["rank"], document["degenerate"]
    return [
        ["rows", document["rows"], f"{number(document['l0'])} latents kept in a row"],
        ["cells visited", document["cells_visited"], f"of 10^{document['cells_possible_log10']:.1f} possible"],
        ["cells with one row", occupancy["singletons"], f"fullest cell {counted(occupancy['max'], 'row')}"],
        ["effective number of cells", occupancy["effective"], f"entropy {number(occupancy['entropy'])} nats"],
        ["rank of a cell's map, median", rank["median"],
         f"full in {100 * rank['full']:.3g}% of {counted(rank['cells'], 'cell')}"],
        *([["latents without encoder weights", bad["zero_encoder"], f"{bad['zero_decoder']:,} with a decoder of zeros"]]
          if bad["zero_encoder"] or bad["zero_decoder"] else []),
        *([["latents equal to another", bad["equal_encoder"], f"{bad['equal_decoder']:,} with another's decoder"]]
          if bad["equal_encoder"] or bad["equal_decoder"] else [])]


def _near(document: dict[str, Any]) -> list[list[Any]]:
    """Margins and local complexity."""
    margin, near, other = document["margin"], document["complexity"], document["other_split"]
    lines = [
        ["margin, median", margin["median"], _middle(margin)],
        ["margin over row norm, median", margin["relative"]["median"], _middle(margin["relative"])],
        ["local complexity, median", near["median"],
         f"{near['boundary']} within {number(near['radius'])}, {counted(near['rows'], 'row')}"]]
    if other is not None:
        lines += [
            [f"margin, {other['split']} rows, median", other["margin"]["median"], _middle(other["margin"])],
            [f"complexity, {other['split']} rows, median", other["complexity"]["median"],
             _middle(other["complexity"])]]
    return lines


def _price(own: dict[str, Any]) -> list[list[Any]]:
    """Local PCA on the SAE's own cells, and the price of shared vectors: with the rows that they rest on, or not."""
    inside = f"{counted(own['rows_measured'], 'row')}, {counted(own['cells'], 'own cell')}"
    if not own["enough"]:
        return [["price of shared vectors", None,
                 f"too few: {inside}" if own["cells"] else "no own cell has enough rows"]]
    return [["FVU of local PCA on own cells", own["local_pca_fvu"], inside],
            ["price of shared vectors", own["price"], f"SAE {number(own['sae_fvu'])} there, less that"]]


def _bridge(compared: dict[str, Any]) -> list[list[Any]]:
    """The references, on how many rows and cells each rests."""
    return [
        ["FVU of k-means", compared["kmeans_fvu"],
         f"{counted(compared['kmeans_cells'], 'cell')}, {counted(compared['rows_fitted'], 'train row')}"],
        ["FVU of the SAE", compared["sae_fvu"], f"{counted(compared['rows_measured'], 'row')}, as the others" + (
            "" if compared["held_out"] else "; rows fitted on are among them")],
        ["FVU of local PCA", compared["local_pca_fvu"],
         f"{counted(compared['local_pca_cells'], 'cell')} of rank {compared['local_pca_rank']:,}"],
        ["FVU of local PCA, variable rank", compared["variable_rank_fvu"],
         f"lambda {number(compared['variable_rank_lambda'])}, mean rank {number(compared['variable_rank_mean'])}"],
        *_price(compared["own_cells"])]


def one_table(document: dict[str, Any]) -> RenderableType:
    """The table of one SAE: what, how much, and of what."""
    title = f"{document['run']} on {document['data']}, {document['split']} rows"
    lines = [*_cells(document), *_diagram(document["power_diagram"]), *_near(document),
             *_bridge(document["references"])]
    return table(title, ["measure", "value", "detail"], lines)


def several_table(documents: Sequence[dict[str, Any]]) -> RenderableType:
    """The table of several SAEs, one a line in the order given."""
    rows = []
    for one in documents:
        compared, own = one["references"], one["references"]["own_cells"]
        price = own["price"] if own["enough"] else "too few"
        rows.append([one["run"], one["rows"], one["l0"], one["cells_visited"], one["margin"]["median"],
                     one["complexity"]["median"], compared["kmeans_fvu"], compared["sae_fvu"],
                     compared["local_pca_fvu"], price, own["rows_measured"], own["cells"]])
    return table(None, ["run", "rows", "l0", "cells visited", "margin, median", "complexity, median", "k-means FVU",
                        "SAE FVU", "local PCA FVU", "price of shared vectors", "rows behind it", "own cells"], rows)

"""How `sae geometry` shows its document to people."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from ..report import counted, number, table


def _middle(measures: dict[str, Any]) -> str:
    return f"middle nine tenths {number(measures['p5'])} to {number(measures['p95'])}"


def _diagram(diagram: dict[str, Any] | None) -> list[list[Any]]:
    """Whether rows lie in their power cells; nothing for an activation without a power diagram."""
    if diagram is None:
        return []
    own = diagram["own_sites"]
    return [
        ["rows in their nearest power cell", diagram["agreement"],
         f"of {counted(diagram['rows'] - diagram['ties'], 'row')}, {counted(diagram['ties'], 'tie')} left out; "
         f"order {diagram['order']}, {counted(diagram['sites'], 'site')}"],
        ["rows nearest to their own cell's site", own["agreement"],
         f"of {counted(own['rows'] - own['ties'], 'row')}, {counted(own['ties'], 'tie')} left out; "
         f"{counted(own['cells'], 'cell')} compared"]]


def _cells(document: dict[str, Any]) -> list[list[Any]]:
    """Cells and latents."""
    occupancy, rank, bad = document["occupancy"], document["rank"], document["degenerate"]
    return [
        ["rows", document["rows"], f"{number(document['l0'])} latents kept in a row"],
        ["cells visited", document["cells_visited"], f"of 10^{document['cells_possible_log10']:.1f} possible"],
        ["cells with one row", occupancy["singletons"], f"fullest cell {counted(occupancy['max'], 'row')}"],
        ["effective number of cells", occupancy["effective"], f"entropy {number(occupancy['entropy'])} nats"],
        ["rank of the map on a cell, median", rank["median"],
         f"{100 * rank['full']:.3g}% of {counted(rank['cells'], 'cell')} as high as their latents allow"],
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
         f"{near['boundary']} within {number(near['radius'])} of a row, over {counted(near['rows'], 'row')}"]]
    if other is not None:
        lines += [
            [f"margin, median of {other['split']} rows", other["margin"]["median"], _middle(other["margin"])],
            [f"local complexity, median of {other['split']} rows", other["complexity"]["median"],
             _middle(other["complexity"])]]
    return lines


def _bridge(compared: dict[str, Any]) -> list[list[Any]]:
    """The references, on how many rows and cells each rests."""
    own = compared["own_cells"]
    fitted = f"fitted on {counted(compared['rows_fitted'], 'training row')}"
    lines = [
        ["FVU of k-means", compared["kmeans_fvu"], f"{counted(compared['kmeans_cells'], 'cell')}, {fitted}"],
        ["FVU of the SAE", compared["sae_fvu"], f"over {counted(compared['rows_measured'], 'row')}, as the others" + (
            "" if compared["held_out"] else "; rows fitted on are among them")],
        ["FVU of local PCA", compared["local_pca_fvu"],
         f"{counted(compared['local_pca_cells'], 'cell')} of rank {compared['local_pca_rank']:,}"],
        ["FVU of local PCA, variable rank", compared["variable_rank_fvu"],
         f"lambda {number(compared['variable_rank_lambda'])}, mean rank {number(compared['variable_rank_mean'])}"]]
    if not own["cells"]:
        return [*lines, ["price of shared vectors", None, "no cell of the SAE holds 4 training rows a dimension"]]
    return [
        *lines,
        ["FVU of local PCA on the SAE's own cells", own["local_pca_fvu"],
         f"{counted(own['cells'], 'cell')}, mean rank {number(own['rank'])}, fitted on "
         f"{counted(own['rows_fitted'], 'training row')}"],
        ["price of shared vectors", own["price"],
         f"the SAE's FVU there, {number(own['sae_fvu'])}, less that; over {counted(own['rows_measured'], 'row')}"]]


def one_table(document: dict[str, Any]) -> RenderableType:
    """The table of one SAE: what, how much, and of what."""
    title = f"{document['run']} on {document['data']}, {document['split']} rows"
    lines = [*_cells(document), *_diagram(document["power_diagram"]), *_near(document),
             *_bridge(document["references"])]
    return table(title, ["measure", "value", "detail"], lines)


def _price(own: dict[str, Any]) -> str:
    """The price of shared vectors, and the rows that it rests on."""
    return f"{number(own['price'])} ({counted(own['rows_measured'], 'row')})" if own["cells"] else "-"


def several_table(documents: Sequence[dict[str, Any]]) -> RenderableType:
    """The table of several SAEs, one a line in the order given."""
    lines = [[one["run"], one["rows"], one["l0"], one["cells_visited"], one["margin"]["median"],
              one["complexity"]["median"], one["references"]["kmeans_fvu"], one["references"]["sae_fvu"],
              one["references"]["local_pca_fvu"], _price(one["references"]["own_cells"])] for one in documents]
    return table(None, ["run", "rows", "l0", "cells visited", "margin, median", "complexity, median", "k-means FVU",
                        "SAE FVU", "local PCA FVU", "price"], lines)

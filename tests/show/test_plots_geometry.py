"""What the panels of `sae geometry --plot` say and show, against brute force over the same rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, make_store, random_sae, some_rows

from saecli.geometry.plane import PlaneCells
from saecli.sae.activations import AbsTopK, Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.show.geometry import cell_image
from saecli.store.split import is_test

CORNERS = (0, 7, 5)


def held_out(home: Path, d_in: int) -> np.ndarray:
    rows = make_store(home, "rows", some_rows(3000, d_in)).astype(np.float64)
    return rows[is_test(np.arange(3000))]


def supports(sae: SAE, x: np.ndarray) -> np.ndarray:
    return (sae.copy_to(torch.float64).encode(torch.from_numpy(x)) != 0).numpy()


def plot(sae: CommandLine, drawn: list[Any], *words: str) -> list[Any]:
    """The panels, their colour bars left out, those of cells first."""
    done = sae("geometry", "one", "--plot", sae.home / "x.svg", *words)
    assert done.status == 0, done.err
    (figure,) = drawn
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation", [TopK(3), AbsTopK(3), Relu()], ids=lambda activation: activation.name
)
def test_projected_rows_and_those_inside_the_cell_are_counted(
    sae: CommandLine, drawn: list[Any], activation: Relu
):
    rows, mine = held_out(sae.home, 8), random_sae(activation)
    make_run(sae.home, "one", mine)
    panels = plot(sae, drawn, "--slice", ",".join(map(str, CORNERS)))
    origin, *others = rows[list(CORNERS)]
    sides = np.array(others) - origin
    projected = origin + np.linalg.lstsq(sides.T, (rows - origin).T)[0].T @ sides
    inside = (supports(mine, rows) == supports(mine, projected)).all(1)
    distance = np.sort(np.linalg.norm(rows - projected, axis=1))[(len(rows) - 1) // 2]
    assert inside.sum() >= len(CORNERS)  # the plane goes through these
    assert panels[1].get_title() == (
        f"{len(rows)} rows projected onto the cells, {inside.sum()} really inside\n"
        f"median distance to the plane: {distance:.3g}"
    )
    assert panels[0].get_title().endswith(f"dots: {len(rows)} rows projected onto it")
    assert len(panels[0].collections[0].get_offsets()) == len(rows)
    bars = [axes.get_ylabel() for axes in drawn[0].axes if axes.get_label() == "<colorbar>"]
    assert bars[-1] == "rows projected onto the cell; white: none"
    headings = [part.get_suptitle() for part in drawn[0].subfigs]
    assert headings[1:] == ["Cells and margins of the rows, in all 8 dimensions"]


@pytest.mark.slow
def test_in_two_dimensions_each_cell_has_the_colour_of_its_rows(sae: CommandLine, drawn: list[Any]):
    rows, mine = held_out(sae.home, 2), random_sae(TopK(3), 2)
    make_run(sae.home, "one", mine)
    panels = plot(sae, drawn)
    assert panels[1].get_title() == f"{len(rows)} rows in the cells"
    texts = drawn[0].findobj(lambda artist: hasattr(artist, "get_text"))
    assert not any("projected" in text.get_text() for text in texts)
    (shown,) = panels[1].images
    left, right, bottom, top = shown.get_extent()
    image = shown.get_array()
    counts = []
    for at in np.random.default_rng(0).integers(1, len(image) - 1, (60, 2)):
        around = image[at[0] - 1 : at[0] + 2, at[1] - 1 : at[1] + 2].reshape(9, 3)
        if (around == around[0]).all():  # no line
            y, x = (at + 0.5) / len(image)
            middle = np.array([left + x * (right - left), bottom + y * (top - bottom)])
            count = (supports(mine, rows) == supports(mine, middle[None])).all(1).sum()
            assert (around[0] == 1).all() == (count == 0)
            counts.append((count, around[0].sum()))
    brightness = [bright for _, bright in sorted(pair for pair in counts if pair[0])]
    assert brightness == sorted(brightness, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "bars"),
    [(TopK(3), 1), (AbsTopK(3), 1), (Relu(), 2)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_cells_are_coloured_only_where_a_bar_says_by_what(
    sae: CommandLine, drawn: list[Any], activation: Relu, bars: int
):
    held_out(sae.home, 8)
    make_run(sae.home, "one", random_sae(activation))
    panels = plot(sae, drawn)
    image = panels[0].images[0].get_array()
    colours = image[image.min(-1) > 0.6]  # no lines
    assert len([axes for axes in drawn[0].axes if axes.get_label() == "<colorbar>"]) == bars
    assert (len(np.unique(colours.round(6), axis=0)) > 2) == (bars == 2)
    assert bars == 2 or "3 latents kept in each" in panels[0].get_title()


@pytest.mark.parametrize("width", [1, 2, 3, 30])
def test_lines_between_pixels_of_one_colour_can_be_seen_however_dense(width: int):
    across = 60 // width
    labels = (np.arange(60) // width)[:, None] * across + np.arange(60) // width
    cells = PlaneCells((0, 1, 0, 1), [b""] * across**2, np.ones(across**2), labels)
    assert cell_image(cells, np.full((across**2, 3), 0.9)).min() <= 0.76 * 0.9

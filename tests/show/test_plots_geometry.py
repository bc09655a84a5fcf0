"""What the panels of `sae geometry --plot` say and show, against brute force over the same rows; and pictures of the
partition against the SAE itself, pixel by pixel."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import Case, cases, encoder, sae_of
from homes import CommandLine, make_run, make_store, random_sae, some_rows
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from saecli.base.errors import ConfigError
from saecli.geometry.cells import cells_of
from saecli.geometry.geometry import Plane, bounds_of, plane_cells
from saecli.sae.activations import AbsTopK, Activation, JumpRelu, Relu, TopK
from saecli.store.split import is_test

CORNERS = (0, 7, 5)


def held_out(home: Path, d_in: int) -> np.ndarray:
    rows = make_store(home, "rows", some_rows(3000, d_in)).astype(np.float64)
    return rows[is_test(np.arange(3000))]


def plot(sae: CommandLine, drawn: list[Any], *words: str) -> list[Any]:
    """The panels, their colour bars left out, that of cells first."""
    sae("geometry", "one", "--plot", sae.home / "x.svg", *words).succeeds()
    (figure,) = drawn
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


@pytest.mark.slow
def test_every_row_is_a_dot_on_the_plane(sae: CommandLine, drawn: list[Any]):
    rows = held_out(sae.home, 8)
    make_run(sae.home, "one", random_sae())
    panels = plot(sae, drawn, "--slice", ",".join(map(str, CORNERS)))
    assert panels[0].get_title().endswith(f"dots: {len(rows)} rows projected onto it")
    assert len(panels[0].collections[0].get_offsets()) == len(rows)
    headings = [part.get_suptitle() for part in drawn[0].subfigs]
    assert headings[1:] == ["Cells and margins of the rows, in all 8 dimensions"]


@pytest.mark.slow
def test_in_two_dimensions_nothing_is_projected(sae: CommandLine, drawn: list[Any]):
    held_out(sae.home, 2)
    make_run(sae.home, "one", random_sae(TopK(3), 2))
    plot(sae, drawn)
    texts = drawn[0].findobj(lambda artist: hasattr(artist, "get_text"))
    assert not any("projected" in text.get_text() for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "bars"),
    [(TopK(3), 0), (AbsTopK(3), 0), (Relu(), 1)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_bar_says_how_many_latents_cells_keep_where_they_differ(sae, drawn, activation, bars):
    held_out(sae.home, 8)
    make_run(sae.home, "one", random_sae(activation))
    panels = plot(sae, drawn)
    assert len([axes for axes in drawn[0].axes if axes.get_label() == "<colorbar>"]) == bars
    assert ("3 latents kept in each" in panels[0].get_title()) == (bars == 0)


WINDOW = (-2.0, 1.0, -1.0, 2.0)


def pixel_centres(P: int) -> np.ndarray:
    """Of `WINDOW`, (P P, 2), from the lower left, row by row."""
    x, y = -2 + (np.arange(P) + 0.5) * 3 / P, -1 + (np.arange(P) + 0.5) * 3 / P
    return np.stack([np.tile(x, P), np.repeat(y, P)], 1)


@pytest.mark.parametrize("activation", [Relu(), JumpRelu(), TopK(2), AbsTopK(2)])
def test_pixels_lie_in_the_cells_of_the_sae(activation: Activation) -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 2, 9, "plain"), activation, rng)
    section = cells_of(Plane.principal(rng.normal(size=(5, 2))).section(sae))
    drawn = plane_cells(section, WINDOW, 40)
    supports = (sae.encode(torch.from_numpy(pixel_centres(40))) != 0).numpy()
    _, first, expected = np.unique(supports, axis=0, return_index=True, return_inverse=True)
    assert len(drawn.sizes) == len(first) > 5
    assert len(set(zip(drawn.labels.ravel().tolist(), expected.tolist(), strict=True))) == len(
        first
    )
    np.testing.assert_array_equal(drawn.sizes[drawn.labels.ravel()], supports.sum(1))


@given(cases(shapes=("plain", "uneven")), st.integers(0, 2**32))
def test_a_section_does_on_the_plane_what_the_sae_does_on_its_points(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    D = case.sae.d_in
    plane = Plane.principal(rng.normal(size=(20, D)))
    u = torch.from_numpy(rng.normal(size=(30, 2)))
    points, section = plane.origin + u @ plane.basis, plane.section(case.sae)
    torch.testing.assert_close(section.encode(u), case.sae.encode(points), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        section(u), plane.coordinates(case.sae(points)), rtol=1e-7, atol=1e-7
    )


@given(st.integers(0, 2**32), st.integers(2, 9))
def test_a_plane_through_three_rows_holds_them_with_their_distances(seed: int, D: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, D)))
    plane = Plane.through(rows)
    places = plane.coordinates(rows)
    torch.testing.assert_close(plane.origin + places @ plane.basis, rows)
    torch.testing.assert_close(torch.cdist(places, places), torch.cdist(rows, rows))
    torch.testing.assert_close(plane.basis @ plane.basis.T, torch.eye(2).double())
    torch.testing.assert_close(
        places[1], torch.stack([(rows[1] - rows[0]).norm(), torch.tensor(0.0).double()])
    )


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([[0.0, 0, 0], [1, 2, 3], [2, 4, 6]]),
        torch.zeros(3, 4),
        torch.tensor([[0.0], [1], [3]]),
        torch.tensor([[1.0, 1, 1], [1, 1, 1], [2, 4, 6]]),
    ],
)
def test_three_rows_on_a_line_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="span no plane"):
        Plane.through(rows)


def test_the_principal_plane_is_that_of_sklearn() -> None:
    rows = np.random.default_rng(0).normal(size=(500, 7)) * np.arange(7, 0, -1) + 3
    plane = Plane.principal(rows)
    pca = PCA(2).fit(rows)
    places = plane.coordinates(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(np.abs(places), np.abs(pca.transform(rows)), atol=1e-9)


@pytest.mark.parametrize("D", [1, 2])
def test_in_one_and_two_dimensions_the_plane_is_the_space_itself(D: int) -> None:
    rows = np.random.default_rng(0).normal(size=(5, D))
    places = Plane.principal(rows).coordinates(torch.from_numpy(rows)).numpy()
    np.testing.assert_array_equal(places[:, :D], rows)
    assert (places[:, D:] == 0).all()


@pytest.mark.parametrize("rows", [np.ones((4, 5)), np.outer(np.arange(4.0), np.ones(5))])
def test_rows_that_span_no_plane_still_get_one(rows: np.ndarray) -> None:
    plane = Plane.principal(rows)
    torch.testing.assert_close(plane.basis @ plane.basis.T, torch.eye(2).double())


def test_the_window_is_a_square_that_holds_most_rows_and_every_corner() -> None:
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(1000, 2)) * [5, 1])
    corners = torch.tensor([[0.0, 40.0]]).double()
    left, right, bottom, top = bounds_of(points, corners)
    assert right - left == pytest.approx(top - bottom)
    held = (points > torch.tensor([left, bottom])) & (points < torch.tensor([right, top]))
    assert held.all(1).double().mean() > 0.95
    assert left < 0 < right
    assert bottom < 40 < top
    assert bounds_of(torch.ones(3, 2).double(), torch.empty(0, 2)) == (0, 2, 0, 2)

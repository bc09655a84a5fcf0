"""Pictures of the partition against the SAE itself, pixel by pixel."""

import sys

import numpy as np
import pytest
import torch
from encoders import Case, cases, encoder, sae_of
from hypothesis import given
from hypothesis import strategies as st
from saecli.show.cell_plots import cell_image, tints
from sklearn.decomposition import PCA

from saecli.base.errors import ConfigError
from saecli.geometry.largest_cells import cells_of
from saecli.geometry.plane import (
    Plane,
    PlaneCells,
    colouring,
    keys_at,
    pixel_cells,
    pixels_for,
    plane_cells,
    polygon_cells,
    touching,
    window_of,
)
from saecli.sae.activations import AbsTopK, Activation, JumpRelu, Relu, TopK


def numbered(patterns: np.ndarray) -> np.ndarray:
    """Numbers for equal patterns in the order of their first appearance."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(pattern.tobytes(), len(numbers)) for pattern in patterns])


WINDOW = (-2.0, 1.0, -1.0, 2.0)


def pixel_centres(P: int) -> np.ndarray:
    """Of `WINDOW`, (P P, 2), from the lower left, row by row."""
    x, y = -2 + (np.arange(P) + 0.5) * 3 / P, -1 + (np.arange(P) + 0.5) * 3 / P
    return np.stack([np.tile(x, P), np.repeat(y, P)], 1)


def holds(polygon: np.ndarray, points: np.ndarray, slack: float) -> np.ndarray:
    """Whether points, (M, 2), lie in a convex polygon whose corners go counter-clockwise, by its sides' turns."""
    along = np.roll(polygon, -1, axis=0) - polygon
    apart = points[:, None] - polygon
    lengths = np.maximum(np.linalg.norm(along, axis=1), 1e-300)
    return ((along[:, 0] * apart[..., 1] - along[:, 1] * apart[..., 0]) / lengths >= -slack).all(1)


@pytest.mark.parametrize("activation", [Relu(), JumpRelu(), TopK(2), AbsTopK(2)])
def test_pixels_of_a_pictured_partition_equal_pixelwise_activation(activation: Activation) -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 2, 9, "plain"), activation, rng)
    plane = Plane.principal(rng.normal(size=(5, 2)))
    drawn = pixel_cells(cells_of(plane.section(sae)), WINDOW, 40)
    supports = (sae.encode(torch.from_numpy(pixel_centres(40))) != 0).numpy()
    expected = numbered(supports)
    np.testing.assert_array_equal(drawn.labels.ravel(), expected)
    assert drawn.count == len(set(expected.tolist())) > 5
    assert drawn.kept[drawn.labels.ravel()].tolist() == supports.sum(1).tolist()


@given(cases(shapes=("plain", "shifted", "clustered", "uneven", "twins", "zeros"), largest_d_sae=14),
       st.integers(0, 2**32))
def test_pixels_lie_in_the_polygon_of_the_latents_that_they_keep_and_in_no_other(case: Case, seed: int) -> None:
    plane = Plane.principal(np.random.default_rng(seed).normal(size=(30, case.sae.d_in)))
    section = cells_of(plane.section(case.sae))
    drawn = polygon_cells(section, WINDOW)
    assert drawn is not None
    points = pixel_centres(25)
    pre = section.pre_activations(torch.from_numpy(points))
    far = (section.margins(pre) > 1e-6).numpy()  # from any boundary, where rounding decides
    inside = np.stack([holds(polygon, points, 1e-8) for polygon in drawn.polygons], 1)
    assert (inside[far].sum(1) == 1).all()
    supports = section.supports(pre)
    for number, polygon in enumerate(drawn.polygons):
        there = supports[torch.from_numpy(inside[:, number] & far)]
        assert (there.sum(1) == drawn.kept[number]).all()
        assert len(there.unique(dim=0)) <= 1
        assert len(polygon) >= 3
    patterns = numbered(supports[torch.from_numpy(far)].numpy())
    found = [drawn.keys[number] for number in inside[far].argmax(1)]
    assert len(set(zip(patterns.tolist(), found, strict=True))) == len(set(patterns.tolist())) == len(set(found))


@pytest.mark.parametrize("activation", [Relu(), TopK(3), AbsTopK(2)])
def test_cells_that_all_meet_in_the_middle_of_the_window_are_found(activation: Activation) -> None:
    rng = np.random.default_rng(0)
    W, b = encoder(rng, 2, 30, "plain")
    section = cells_of(sae_of(W, 0 * b, activation, rng))
    drawn = polygon_cells(section, (-1.0, 1.0, -1.0, 1.0))
    pixels = pixel_cells(section, (-1.0, 1.0, -1.0, 1.0), 200)
    assert set(pixels.keys) <= set(drawn.keys)


@pytest.mark.parametrize("activation", [Relu(), TopK(3), TopK(1)])
def test_polygons_touch_along_their_sides(activation: Activation) -> None:
    rng = np.random.default_rng(0)
    section = cells_of(sae_of(*encoder(rng, 2, 9, "plain"), activation, rng))
    exact, pixels = polygon_cells(section, WINDOW), pixel_cells(section, WINDOW, 500)
    place = {key: number for number, key in enumerate(exact.keys)}
    seen = {tuple(sorted((place[pixels.keys[a]], place[pixels.keys[b]]))) for a, some in enumerate(pixels.neighbours)
            for b in some}
    sides = {tuple(sorted((a, b))) for a, some in enumerate(exact.neighbours) for b in some}
    assert len(seen & sides) >= 0.9 * len(sides) > 5  # pixels that touch may lie across a corner
    colours = tints(exact)
    assert all((colours[a] != colours[b]).any() for a, b in sides)


@pytest.mark.slow
def test_many_cells_are_drawn_as_pixels_and_few_as_polygons(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    section = cells_of(sae_of(*encoder(rng, 2, 30, "plain"), Relu(), rng))
    exact = plane_cells(section, WINDOW)
    assert (exact.labels, exact.count) == (None, len(exact.polygons))
    monkeypatch.setattr(sys.modules["saecli.geometry.plane_cells"], "POLYGONS", exact.count // 3)
    pixels = plane_cells(section, WINDOW)
    assert pixels.polygons is None
    assert 0.8 * exact.count < pixels.count <= exact.count
    assert polygon_cells(section, WINDOW, exact.count - 1) is None


def test_rows_are_counted_in_the_cells_that_they_fall_in() -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 2, 9, "plain"), TopK(2), rng)
    points = torch.from_numpy(rng.uniform(-1, 1, size=(300, 2)))
    section = cells_of(sae)
    for drawn in (polygon_cells(section, WINDOW), pixel_cells(section, WINDOW, 100)):
        counts = drawn.occupancy(keys_at(section, points))
        assert counts.sum() == 300
        assert sorted(counts[counts > 0]) == sorted((sae.encode(points) != 0).unique(dim=0, return_counts=True)[1])


@given(cases(shapes=("plain", "uneven")), st.integers(0, 2**32))
def test_a_section_does_on_the_plane_what_the_sae_does_on_its_points(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    D = case.sae.d_in
    plane = Plane.principal(rng.normal(size=(20, D)))
    u = torch.from_numpy(rng.normal(size=(30, 2)))
    points, section = plane.origin + u @ plane.basis, plane.section(case.sae)
    torch.testing.assert_close(section.encode(u), case.sae.encode(points), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(section(u), plane.coordinates(case.sae(points)), rtol=1e-7, atol=1e-7)


@given(st.integers(0, 2**32), st.integers(2, 9))
def test_a_plane_through_three_rows_holds_them_with_their_distances(seed: int, D: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, D)))
    plane = Plane.through(rows)
    places = plane.coordinates(rows)
    torch.testing.assert_close(plane.origin + places @ plane.basis, rows)
    torch.testing.assert_close(torch.cdist(places, places), torch.cdist(rows, rows))
    torch.testing.assert_close(plane.basis @ plane.basis.T, torch.eye(2).double())
    torch.testing.assert_close(places[1], torch.stack([(rows[1] - rows[0]).norm(), torch.tensor(0.0).double()]))


@pytest.mark.parametrize("rows", [
    torch.tensor([[0.0, 0, 0], [1, 2, 3], [2, 4, 6]]), torch.zeros(3, 4), torch.tensor([[0.0], [1], [3]]),
    torch.tensor([[1.0, 1, 1], [1, 1, 1], [2, 4, 6]])])
def test_three_rows_on_a_line_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="rows of slice span no plane"):
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
    left, right, bottom, top = window_of(points, corners)
    assert right - left == pytest.approx(top - bottom)
    held = (points > torch.tensor([left, bottom])) & (points < torch.tensor([right, top]))
    assert held.all(1).double().mean() > 0.95
    assert left < 0 < right
    assert bottom < 40 < top
    assert window_of(torch.ones(3, 2).double(), torch.empty(0, 2)) == (0, 2, 0, 2)


def test_larger_saes_get_fewer_pixels() -> None:
    assert [pixels_for(F) for F in (2, 4096, 16_384, 10**6)] == [640, 382, 240, 240]


@pytest.mark.parametrize("seed", range(10))
def test_neighbouring_cells_get_different_colours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sites, pixels = rng.random((80, 2)), np.stack(np.meshgrid(*[np.linspace(0, 1, 60)] * 2), -1)
    labels = numbered(((pixels[:, :, None] - sites) ** 2).sum(-1).argmin(-1).reshape(-1, 1)).reshape(60, 60)
    colours = colouring(touching(labels), 6)
    for a, b in ((labels[1:], labels[:-1]), (labels[:, 1:], labels[:, :-1])):
        assert (colours[a] != colours[b])[a != b].all()
    assert len(set(colours.tolist())) == 6


@pytest.mark.parametrize("labels", [np.zeros((3, 3), int), np.arange(900).reshape(30, 30)])
def test_cell_images_have_colours_for_one_cell_and_for_one_a_pixel(labels: np.ndarray) -> None:
    count = labels.max() + 1
    cells = PlaneCells(WINDOW, [bytes(n) for n in range(count)], np.ones(count), touching(labels), None, labels)
    image = cell_image(cells, tints(cells))
    assert image.shape == (*labels.shape, 3)
    assert ((image >= 0) & (image <= 1)).all()

"""Pictures: their files, what they draw against the data, and the inputs at the edges; those of `sae geometry` against
brute force over the same rows, pixel by pixel."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from encoders import Case, cases, encoder, sae_of
from homes import CommandLine, make_run, make_store, random_sae, some_rows
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from matplotlib.image import imread
from sklearn.decomposition import PCA

from saecli.base.errors import ConfigError
from saecli.geometry.cells import cells_of
from saecli.geometry.geometry import Plane, bounds_of, plane_cells
from saecli.sae.activations import AbsTopK, Activation, JumpRelu, Relu, TopK
from saecli.show.measures import l0_bins
from saecli.show.pictures import (
    FVU_LABEL,
    draw_firing,
    draw_frontier,
    draw_losses,
    draw_patterns,
    draw_probes,
    draw_stability,
)
from saecli.show.style import COLOURS
from saecli.store.split import is_test

LINES = [
    {"step": 20, "loss": 3.0, "batch_fvu": 0.5, "batch_l0": 30.0},
    {"step": 40, "loss": 2.0, "batch_fvu": 0.25, "batch_l0": 20.0},
    {"step": 40, "epoch": 1, "test_fvu": 0.3, "test_l0": 21.0, "alpha": 1.0},
]
PERFECT = {"step": 1, "batch_fvu": 0.0, "batch_l0": 0.0}
NO_NUMBER = {"step": 1, "batch_fvu": float("nan"), "batch_l0": None}
MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def matched(*runs: tuple) -> dict[str, Any]:
    """A document of stability: cosines, match fractions and frequencies of each run's latents."""
    columns = ("cosine", "match_fraction", "frequency")
    return {
        "match_by": "decoder",
        "match_threshold": 0.7,
        "runs": [
            {"run": f"run {at}", **dict(zip(columns, run, strict=True))}
            for at, run in enumerate(runs)
        ],
    }


def compared(*runs: tuple) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The measures of runs, and their families, given name, L0, FVU and family."""
    columns = ("run", "l0", "fvu", "family")
    measures = [dict(zip(columns, run, strict=True)) for run in runs]
    return measures, {run["run"]: run["family"] for run in measures}


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


ALONE = ("one", 32.0, 0.2, "relu")
NO_FVU = ("one", 32.0, float("nan"), "relu")
DRAW: dict[str, tuple[Any, ...]] = {  # the function, and its arguments after the path
    "loss curves": (draw_losses, "one", LINES),
    "loss curves of no number": (draw_losses, "one", [NO_NUMBER]),
    "loss curves of one point": (draw_losses, "one", LINES[:1]),
    "loss curves of a perfect run": (draw_losses, "one", [PERFECT]),
    "firing": (draw_firing, {"one": (torch.tensor([0, 5, 3, 0]), torch.tensor([0.0, 0.3, 1.0]))}),
    "firing of none": (draw_firing, {}),
    "firing of silent latents": (draw_firing, {"one": (np.array([9, 0, 0]), np.zeros(2))}),
    "patterns": (draw_patterns, torch.eye(5)[:, :3] - 0.5, "one"),
    "patterns of no rows": (draw_patterns, torch.zeros(0, 7), "one"),
    "patterns of silent latents": (draw_patterns, np.zeros((4, 7)), "one"),
    "patterns of many latents": (draw_patterns, np.eye(50, 4000), "one"),
    "frontier": (draw_frontier, *compared(ALONE, ("two", 500.0, 0.01, "topk"))),
    "frontier of one": (draw_frontier, *compared(ALONE)),
    "frontier of none": (draw_frontier, *compared()),
    "frontier of no number": (draw_frontier, *compared(NO_FVU, ("two", 0.0, 0.0, "relu"))),
    "stability": (draw_stability, matched(([0.5, None], [1, 0], [0.1, 0]), ([1], [1], [1]))),
    "stability of none": (draw_stability, matched()),
    "stability of silent latents": (draw_stability, matched(([0.5, 0.1], [0, 0], [0, 0]))),
    "stability of no counterparts": (draw_stability, matched(([None], [0], [0.5]))),
}


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW.keys())
def test_every_input_gives_a_picture_that_can_be_read(draw: tuple, tmp_path: Path) -> None:
    function, *arguments = draw
    function(tmp_path / "x.png", *arguments)
    image = imread(tmp_path / "x.png")
    assert min(image.shape[:2]) > 400
    assert image[..., :3].std() > 0.01
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", MAGIC)
def test_the_ending_is_the_format_and_the_same_data_the_same_file(suffix: str, tmp_path: Path):
    first, second = tmp_path / "new" / f"first{suffix}", tmp_path / f"second{suffix.upper()}"
    for path in (first, second):
        draw_losses(path, "one", LINES)
    assert first.read_bytes().startswith(MAGIC[suffix])
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["x.gif", "x"])
def test_another_ending_is_refused_in_one_sentence_and_nothing_written(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot draw --plot "):
        draw_frontier(tmp_path / name, [], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("suffix", MAGIC)
def test_any_name_is_drawn_as_it_is_spelt(suffix: str, drawn: list[Figure], tmp_path: Path) -> None:
    names = ["_hidden", "$x^2$ $\\frac{$", "\\$y$", "f\udcff\u202e\0", "日本 😀"]
    draw_firing(tmp_path / f"x{suffix}", dict.fromkeys(names, (np.array([3, 4]), np.array([0.5]))))
    (legend,) = drawn[0].legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert not any(map(is_math_text, shown))
    expected = (*names[:3], "f\ufffd\ufffd\ufffd", names[4])
    assert [text.replace(r"\$", "$") for text in shown] == [
        f"{name} (0 of 1 silent on these 7 rows)" for name in expected
    ]
    for name in names:
        draw_patterns(tmp_path / f"x{suffix}", np.eye(3), name)
    if suffix == ".svg":
        ElementTree.parse(tmp_path / "x.svg")


def test_loss_curves_draw_each_measure_against_its_own_steps(drawn: list[Figure], tmp_path: Path):
    draw_losses(tmp_path / "x.png", "one", LINES)
    lines = [line for axes in drawn[0].axes for line in axes.lines]
    assert [list(line.get_xdata()) for line in lines] == [[20, 40], [40]] * 2
    assert [list(line.get_ydata()) for line in lines] == [[0.5, 0.25], [0.3], [30, 20], [21]]
    assert [axes.get_yscale() for axes in drawn[0].axes] == ["log", "linear"]


@pytest.mark.parametrize(
    "counts", [[0, 5, 3, 0], [8], [0] * 32 + [100] + [0] * 200, list(range(1000))]
)
def test_l0_histogram_holds_every_row_once_at_its_place(counts: list[int]) -> None:
    rows, edges = l0_bins(np.array(counts), 60)
    values = np.repeat(np.arange(len(counts)), counts)
    np.testing.assert_array_equal(rows, np.histogram(values, edges)[0])
    assert rows.sum() == sum(counts) and len(rows) <= 61


def test_firing_counts_silent_latents_in_the_legend_and_others_in_bars(drawn, tmp_path):
    frequency = np.array([0, 0, 1e-4, 0.01, 0.5, 1.0])
    draw_firing(tmp_path / "x.png", {"one": (np.array([3, 4]), frequency)})
    assert legend_of(drawn[0]) == ["one (2 of 6 silent on these 7 rows)"]
    bars = drawn[0].axes[1].patches[0].get_data()
    assert (bars.values.sum(), bars.edges[0], bars.edges[-1]) == (4, pytest.approx(1e-4), 1)


def test_patterns_show_sizes_with_the_most_frequent_latents_first(drawn, tmp_path):
    codes = np.array([[0, -1, 2, 0], [0, 0, 3, 0], [0, 0, 4, 5]])
    draw_patterns(tmp_path / "x.png", codes, "one")
    np.testing.assert_array_equal(
        drawn[0].axes[0].images[0].get_array(), np.abs(codes[:, [2, 1, 3]])
    )


def test_frontier_draws_each_run_and_joins_families(drawn: list[Figure], tmp_path: Path) -> None:
    runs = [("a", 10.0, 0.3, "topk"), ("b", 20.0, 0.2, "topk")]
    runs += [("c", 20.0, 0.25, "relu"), ("d", 5.0, 0.3, "relu")]
    draw_frontier(tmp_path / "x.png", *compared(*runs))
    lines = drawn[0].axes[0].lines
    points = [line for line in lines if line.get_linestyle() == "None"]
    markers = {(line.get_xdata()[0], line.get_ydata()[0]): line.get_marker() for line in points}
    assert markers[10.0, 0.3] == markers[20.0, 0.2] != markers[5.0, 0.3]
    assert len({line.get_color() for line in points}) == 4 == len(markers)
    joined = [list(line.get_xdata()) for line in lines if len(line.get_xdata()) == 2]
    assert sorted(joined) == [[5, 20], [10, 20]]
    assert legend_of(drawn[0]) == ["1 a (topk)", "2 b (topk)", "3 c (relu)", "4 d (relu)"]


def test_a_run_has_one_colour_in_all_pictures_of_the_same_runs(drawn: list[Figure]) -> None:
    counts = (np.array([3, 4]), np.array([0.5]))
    draw_firing(None, {"b": counts, "a": counts})
    draw_frontier(None, *compared(("a", 4.0, 0.2, "relu"), ("b", 5.0, 0.3, "relu")))
    draw_frontier(None, *compared(("b", 4.0, 0.2, "relu"), ("a", 5.0, 0.3, "relu")))
    for figure in drawn:
        handles = figure.legends[0].legend_handles
        # "b (0 of 1 silent ...", or "1 b (relu)".
        names = [text.removesuffix(" (relu)").lstrip("12 ")[0] for text in legend_of(figure)]
        colours = {name: line.get_color() for name, line in zip(names, handles, strict=True)}
        assert colours == {"a": COLOURS[0], "b": COLOURS[1]}
    assert len(drawn) == 3


def test_a_frontier_of_near_runs_shows_them_apart_and_of_far_ones_begins_at_zero(drawn):
    near, far = (("a", 16.0, 0.31), ("b", 16.0, 0.28)), (("a", 4.0, 0.9), ("b", 16.0, 0.28))
    for runs in (near, far):
        draw_frontier(None, *compared(*((*run, "topk") for run in runs)))
    (low_l0, high_l0), (low, high) = (
        getattr(drawn[0].axes[0], f"get_{which}lim")() for which in "xy"
    )
    assert 15 < low_l0 < 16 < high_l0 < 17
    assert 0.26 < low < 0.28 < 0.31 < high < 0.33
    assert drawn[1].axes[0].get_xlim()[0] == drawn[1].axes[0].get_ylim()[0] == 0


def test_a_constant_l0_is_said_and_has_no_panel(drawn: list[Figure]) -> None:
    lines = [line | {name: 16.0 for name in line if name.endswith("l0")} for line in LINES]
    draw_losses(None, "one", lines)
    assert [axes.get_ylabel() for axes in drawn[0].axes] == [FVU_LABEL]
    assert drawn[0].get_suptitle() == "one, L0 16 at every step"
    runs = {"one": (np.array([0, 0, 7]), np.array([0.5])), "two": (np.array([0, 5]), np.ones(1))}
    draw_firing(None, runs)
    assert [axes.get_ylabel() for axes in drawn[1].axes] == ["latents"]
    assert legend_of(drawn[1])[0] == "one (L0 2, 0 of 1 silent on these 7 rows)"


def test_stability_draws_cosines_and_match_fractions_by_frequency(drawn, tmp_path):
    frequency = np.repeat([0, 0.01, 0.02, 0.5], [5, 30, 30, 40])
    often = np.where(frequency == 0.02, 0.25, np.where(frequency == 0.5, np.arange(105) % 2, 0))
    draw_stability(
        tmp_path / "x.png", matched(([*np.linspace(0, 1, 100), *[None] * 5], often, frequency))
    )
    left, right = drawn[0].axes
    assert left.patches[0].get_data().values.sum() == pytest.approx(100 / 105)
    (line,) = right.lines
    np.testing.assert_allclose(line.get_xydata(), [[0.01, 0], [0.02, 0.25], [0.5, 0.5]])
    assert legend_of(drawn[0]) == ["run 0 (105 latents, 5 silent)"]


def test_picture_has_each_runs_aucs_by_k_and_a_point_per_set_and_run(drawn: list, tmp_path: Path):
    sets, by_set = [0.8, 1.0, 0.9], {"first": [0.7, 0.9, 0.8], "second": [0.3, 0.8, 1.0]}
    place = {"layer": 2, "site": "resid_post"}
    columns = ("run", "k", "auc", "auc_low", "auc_high")
    means = [
        ("first", 1, 0.6, 0.5, 0.7),
        ("first", 16, 0.8, 0.7, 0.9),
        ("second", 1, 0.7, 0.7, 0.7),
        ("second", 16, 0.7, 0.6, 0.8),
        (None, None, 0.9, 0.85, 0.95),
    ]
    aucs_of = [(run, auc) for run, aucs in ({None: sets} | by_set).items() for auc in aucs]
    document = {
        "runs": [{"run": run, **place} for run in by_set],
        "probes": [dict(zip(columns, mean, strict=True)) | place for mean in means],
        "by_set": [{"run": run, **place, "k": run and 16, "auc": auc} for run, auc in aucs_of],
    }
    draw_probes(tmp_path / "probes.svg", document)
    left, right = drawn[0].axes
    curves = [container.lines[0] for container in left.containers]
    assert [list(line.get_ydata()) for line in curves] == [[0.6, 0.8], [0.7, 0.7]]
    np.testing.assert_allclose([line.get_xdata() for line in curves], [[1, 16]] * 2, rtol=0.05)
    ends = [container.lines[2][0].get_segments()[0][:, 1] for container in left.containers]
    np.testing.assert_allclose(ends, [[0.5, 0.7], [0.7, 0.7]])
    points = [(list(line.get_xdata()), list(line.get_ydata())) for line in right.lines[:2]]
    assert points == [(sets, aucs) for aucs in by_set.values()]
    low, high = right.get_ylim()
    assert low < 0.3 and high > 1
    names = legend_of(drawn[0])
    assert names == ["first", "second", "dense probe on the activations"]
    assert [list(line.get_ydata()) for line in left.lines if line.get_linestyle() == ":"] == [
        [0.9, 0.9]
    ]


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
    assert len({*zip(drawn.labels.ravel().tolist(), expected.tolist(), strict=True)}) == len(first)
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

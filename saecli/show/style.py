"""The common style of all pictures, and saving them."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ..base.errors import ConfigError
from ..base.files import appearing_whole

# Okabe and Ito, "Color Universal Design" (2008), their yellow left out: it is too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")  # after seven runs the colours repeat, dashed
MARKERS = "osD^vPXp"
GREY = "#666666"

# No date and no random identifiers: the same data gives the same file.
PICTURE_FORMATS: dict[str, dict[str, Any]] = {
    ".png": {},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
}

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "saecli",
}

NAME_WIDTH = 40  # letters of a run's name in a legend


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ConfigError(
            f"cannot draw --plot {path}: a picture's name ends in {', '.join(PICTURE_FORMATS)}; choose another"
        )


@contextmanager
def figure(path: Path | None, width: float, height: float) -> Iterator[Figure]:
    """An empty figure in the common style, its size in inches. After the block it is saved to `path`; None: only laid
    out, for a notebook."""
    if path is not None:
        check_suffix(path)
    with matplotlib.rc_context(STYLE):
        # Without pyplot, figures are garbage-collected and no display is needed.
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield drawn
        if path is None:
            FigureCanvasAgg(drawn).draw()  # in this style
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        suffix = path.suffix.lower()
        with appearing_whole(path) as temporary, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box is drawn for it
            drawn.savefig(temporary, format=suffix[1:], metadata=PICTURE_FORMATS[suffix])


def numbered(names: Iterable[str]) -> dict[str, int]:
    """Numbers for `colour` and `marker`, alike in pictures of the same runs in another order."""
    return {name: number for number, name in enumerate(sorted({*names}))}


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def line_style(index: int) -> dict[str, Any]:
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": colour(index), "linestyle": dash}


def short(name: str) -> str:
    """A label: the middle of a long name left out, unprintable characters as U+FFFD, dollars, which begin a formula,
    escaped."""
    half = NAME_WIDTH // 2 - 1
    shown = name if len(name) <= NAME_WIDTH else f"{name[:half]}…{name[-half:]}"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in shown).replace(
        "$", r"\$"
    )


def log_scale(axes: Axes, which: str) -> None:
    """Make an axis, "x" or "y", logarithmic, with plain numbers below two decades."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    if low > 0 and high < 100 * low:
        # Within a decade 1, 2 and 5 are too few to read a curve by.
        subs = (1, 1.5, 2, 3, 4, 5, 7) if high <= 10 * low else (1, 2, 5)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def legend_below(drawn: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """One legend under all panels; the figure grows by its height."""
    if not handles:
        return
    inches = max(0.35 + 0.075 * len(label) for label in labels) + 0.3
    columns = max(1, min(len(labels), int(drawn.get_figwidth() // inches)))
    drawn.set_figheight(drawn.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    below = drawn.legend(handles, [" "] * len(labels), loc="outside lower center", ncols=columns)
    for text, label in zip(below.get_texts(), labels, strict=True):
        text.set_text(label)  # matplotlib hides labels that begin with _ if given at first


def say_empty(axes: Axes, words: str = "nothing to draw") -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=GREY)

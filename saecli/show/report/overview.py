"""The first page: the run, learning curves, firing frequencies, a table of all latents; and links to Neuronpedia.

`assets/neuronpedia.json` lists repositories on the hub: Neuronpedia's name for their SAEs, with {layer} and {width} for
parts of the folder's name; a pattern of the folders' names; and, where a repository has several SAEs of one layer and
width, the average L0 of the one that Neuronpedia shows. Shapes: F = d_sae.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from torch import Tensor

from ...base.errors import ConfigError
from ...measure.latents import Survey, bin_edges
from ...sae.hub import Address
from ...sae.metrics import DENSE_FREQUENCY

FEWEST_ROWS = 10  # of a latent with an interest
SITE = "https://www.neuronpedia.org/"
_SOURCE = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
POINTS = 400  # points of a curve, about its width in pixels
L0_BINS, FREQUENCY_BINS = 40, 30
CURVES = {"loss": (("batch_fvu", "training batches, averaged"), ("test_fvu", "held-out rows")),
          "l0": (("batch_l0", "training batches, averaged"), ("test_l0", "held-out rows"))}


def overview(heading: Mapping[str, Any], measures: Mapping[str, Any], survey: Survey,
             curves: Sequence[Mapping[str, Any]], facts: Mapping[str, Mapping[str, Any]],
             notes: Sequence[str]) -> dict[str, Any]:
    """The first page's content, without the columns of its table that `details` fills.

    Args:
        heading: names of run, store and split, and other entries below the title.
        measures: the results of `sae eval`, on held-out rows if there are any.
        survey: the results of the pass over the rows.
        curves: the lines of the run's `metrics.jsonl`; none without that file.
        facts: settings by section and name.
        notes: sentences on missing content, and why.
    """
    firing = survey.firing.result()
    frequency = np.array(firing.pop("frequency"))
    return {"heading": dict(heading), "measures": dict(measures), "firing": firing, "notes": list(notes),
            "dense": DENSE_FREQUENCY, "fewest": FEWEST_ROWS,
            "facts": {section: {name: _word(value) for name, value in settings.items()}
                      for section, settings in facts.items()},
            "curves": {name: [{"name": label, "points": _curve(curves, key)} for key, label in pair]
                       for name, pair in CURVES.items()},
            "l0": _l0_bins(survey.firing.l0_histogram.numpy()), "frequency": _frequency_bins(frequency),
            "edges": bin_edges().tolist(),
            "latents": {"frequency": rounded(frequency), "mean": rounded(survey.magnitudes.means),
                        "largest": rounded(survey.magnitudes.largest)}}


def rounded(values: np.ndarray | Tensor) -> list[float]:
    """Numbers to four significant digits, which keeps files small."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _curve(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """The steps and finite values of a measure, thinned to about `POINTS`, including the last."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    return points[:: -max(1, math.ceil(len(points) / POINTS))][::-1]


def _l0_bins(histogram: np.ndarray) -> dict[str, list[float]]:
    """A histogram of L0, (F + 1,), regrouped into at most `L0_BINS` bins over its range."""
    present = np.flatnonzero(histogram)
    low, high = max(0, int(present[0]) - 1), int(present[-1]) + 1  # a margin, so that a single value shows as a bar
    step = math.ceil((high - low + 1) / L0_BINS)
    edges = np.arange(low, high + step + 1, step)
    counts, _ = np.histogram(np.arange(len(histogram)), edges - 0.5, weights=histogram)
    return {"edges": (edges - 0.5).tolist(), "counts": counts.astype(int).tolist()}


def _frequency_bins(frequency: np.ndarray) -> dict[str, list[float]]:
    """A histogram, in logarithmic bins, of the latents' non-zero firing frequencies, (F,)."""
    fires = frequency[frequency > 0]
    edges = np.logspace(math.floor(math.log10(fires.min())) if len(fires) else -3, 0, FREQUENCY_BINS + 1)
    counts, _ = np.histogram(fires, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def neuronpedia_url(name: str, source: str | None = None) -> str | None:
    """The address below which Neuronpedia has a page for each latent of an SAE, given its address on the hub, or
    Neuronpedia's own name of it, `MODEL/SOURCE`, such as `gemma-2-2b/20-gemmascope-res-16k`; None if there is none."""
    if source is None:
        source = _known(name)
    elif not _SOURCE.fullmatch(source):
        raise ConfigError("--neuronpedia must be MODEL/SOURCE such as gemma-2-2b/20-gemmascope-res-16k, got "
                          f"{source!r}", option="neuronpedia")
    return None if source is None else f"{SITE}{source}"


def _known(name: str) -> str | None:
    address = Address.parse(name)
    if address is None:
        return None
    for entry in _table():
        if entry["repo"] == address.repo and (found := re.fullmatch(entry["folder"], address.folder)):
            parts = found.groupdict()
            shown = entry.get("l0", {}).get(parts.get("width"))
            if "l0" not in entry or (shown and shown.get(parts["layer"]) == int(parts["l0"])):
                return entry["source"].format_map(parts)
    return None


@cache
def _table() -> list[dict[str, Any]]:
    return json.loads((files(__package__) / "assets" / "neuronpedia.json").read_text(encoding="utf-8"))

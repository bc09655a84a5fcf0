"""The first page: the run, learning curves, firing frequencies, a table of all latents; and links to Neuronpedia.

`assets/neuronpedia.json` lists repositories on the hub: Neuronpedia's name for their SAEs, with {layer} and {width} for
parts of the folder's name; a pattern of the folders' names; and, where a repository has several SAEs of one layer and
width, the average L0 of the one that Neuronpedia shows. Shapes: F = d_sae.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from torch import Tensor

from ...base.errors import ConfigError
from ...measure.latents import Survey, bin_edges
from ...sae.hub import Address
from ...sae.metrics import DENSE_FREQUENCY
from ..measures import curve, frequency_edges, l0_bins

FEWEST_ROWS = 10  # of a latent with an interest
SITE = "https://www.neuronpedia.org/"
_SOURCE = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
POINTS = 400  # points of a curve, about its width in pixels
L0_BINS = 40
CURVES = {"loss": (("batch_fvu", "training batches, averaged"), ("test_fvu", "held-out rows")),
          "l0": (("batch_l0", "training batches, averaged"), ("test_l0", "held-out rows"))}


def overview(heading: Mapping[str, Any], measures: Mapping[str, Any], survey: Survey,
             curves: Sequence[Mapping[str, Any]], facts: Mapping[str, Mapping[str, Any]],
             notes: Sequence[str]) -> dict[str, Any]:
    """The first page's content, without the columns of its table that `details` fills.

    `heading` has the entries below the title, `curves` the lines of `metrics.jsonl`, `facts` settings by section and
    name, `notes` sentences on missing content.
    """
    firing = survey.firing.result()
    frequency = np.array(firing.pop("frequency"))
    return {"heading": dict(heading), "measures": dict(measures), "firing": firing, "notes": list(notes),
            "dense": DENSE_FREQUENCY, "fewest": FEWEST_ROWS,
            "facts": {section: {name: _word(value) for name, value in settings.items()}
                      for section, settings in facts.items()},
            "curves": {name: [{"name": label, "points": _thinned(curve(curves, key))} for key, label in pair]
                       for name, pair in CURVES.items()},
            "l0": _bins(*l0_bins(survey.firing.l0_histogram.numpy(), L0_BINS)),
            "frequency": _bins(*np.histogram(frequency[frequency > 0], frequency_edges(frequency))),
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


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """About `POINTS` of the points, including the last."""
    return points[:: -max(1, math.ceil(len(points) / POINTS))][::-1]


def _bins(counts: np.ndarray, edges: np.ndarray) -> dict[str, list[float]]:
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
    table = (files(__package__) / "assets" / "neuronpedia.json").read_text(encoding="utf-8")
    for entry in json.loads(table):
        if entry["repo"] == address.repo and (found := re.fullmatch(entry["folder"], address.folder)):
            parts = found.groupdict()
            shown = entry.get("l0", {}).get(parts.get("width"))
            if "l0" not in entry or (shown and shown.get(parts["layer"]) == int(parts["l0"])):
                return entry["source"].format_map(parts)
    return None

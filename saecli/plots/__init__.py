"""Pictures, saved as PNG, PDF or SVG by the ending of their path; only this package imports matplotlib."""

from .geometry import GeometryPicture, geometry, geometry_runs
from .places import places
from .probing import ProbedRun, probes
from .runs import firing, frontier, loss_curves, patterns
from .stability import stability
from .style import check_suffix, kept_figures

__all__ = ["GeometryPicture", "ProbedRun", "check_suffix", "firing", "frontier", "geometry", "geometry_runs",
           "kept_figures", "loss_curves", "patterns", "places", "probes", "stability"]

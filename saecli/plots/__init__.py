"""Pictures, saved as PNG, PDF or SVG by the ending of their path; the only place that imports matplotlib."""

from .geometry import GeometryPicture, geometry
from .runs import firing, frontier, loss_curves, patterns
from .style import check_suffix

__all__ = ["GeometryPicture", "check_suffix", "firing", "frontier", "geometry", "loss_curves", "patterns"]

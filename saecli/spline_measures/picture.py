"""The picture of one SAE's geometry, from what was found out about it. Shapes: M rows."""

import operator
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..spline.census import spread_out
from ..spline.partition import cells_of
from ..spline.plane_cells import keys_at, plane_cells
from ..spline.planes import Plane, window_of
from ..wording import number
from .measures import Found

ARROWS = 200  # rows whose reconstructions are drawn


@torch.no_grad()
def draw_one(path: Path, found: Found, through: Plane | None, marked: Mapping[int, Tensor]) -> None:
    """Draw what was found out.

    Args:
        path: where to.
        found: what was found out.
        through: the plane that is shown; None for the principal one.
        marked: the rows that it goes through, by number, (D,) each.
    """
    from ..plots import GeometryPicture, geometry  # matplotlib takes a second to import

    one, document, sample = found.one, found.document, found.survey.sample.rows
    plane = through or Plane.principal(sample)
    x = torch.from_numpy(sample)
    points = plane.coordinates(x)
    places = plane.coordinates(torch.stack(list(marked.values()))) if marked else points[:0]
    caption = (f"on the plane through rows {', '.join(map(str, marked))}" if marked
               else "on the plane of principal components 1 and 2" if one.sae.d_in > 2 else "in the space of the rows")
    section = cells_of(plane.section(one.sae))
    cells, fallen_on = plane_cells(section, window_of(points, places)), keys_at(section, points)
    own = found.survey.sample_keys.rows.tolist()
    rows, near = spread_out(sample, ARROWS), document["complexity"]
    compared = document["references"]
    fvus = {"k-means": compared["kmeans_fvu"], "SAE": compared["sae_fvu"], "local PCA": compared["local_pca_fvu"]}
    ends = found.bridge.reconstructions(rows)
    geometry(path, GeometryPicture(
        title=f"{document['run']} on {document['data']}", caption=caption, d_in=one.sae.d_in, cells=cells,
        occupancy=cells.occupancy(fallen_on), points=points.numpy(), distance=float(plane.distances(x).median()),
        at_home=sum(map(operator.eq, fallen_on, own)),
        marks=dict(zip(marked, places.numpy(), strict=True)),
        margins={split: some[:, 0] for split, some in found.margins.items()}, complexity=found.complexity,
        near=f"{near['boundary']} within {number(near['radius'])}", growth=found.survey.census.growth,
        sizes=found.survey.census.sizes(), rows=plane.coordinates(torch.from_numpy(rows)).numpy(),
        bridge={name: (plane.coordinates(torch.from_numpy(np.asarray(ends[name]))).numpy(), fvu)
                for name, fvu in fvus.items()}))

"""Several SAEs or transcoders in one forward pass, such as a set of transcoders of all layers.

Each encodes what it reads in that pass, where those before it have already replaced activations; so the errors of a
layer reach the next. The rows replaced are those of a store's windows, as when an SAE is spliced alone.

Shapes: n rows of a forward pass, D = d_in, E = d_out.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..base.errors import ConfigError
from .options import HookPoint
from .passes import CleanPass, Passes
from .splice import Hooked, StoredWindow

Predict = Callable[[int, Tensor, Tensor], Tensor]


def demand_together(acts: Sequence[Hooked]) -> None:
    """Refuse crosscoders, and SAEs that replace activations at one hook point."""
    written: dict[HookPoint, str] = {}
    for at in acts:
        if at.sae.widths:
            raise ConfigError(
                f"--together takes SAEs and transcoders, got {at.name}, a crosscoder: its codes need all its hook "
                "points before the first of them is replaced; leave it out"
            )
        if at.written in written:
            raise ConfigError(
                f"{written[at.written]} and {at.name} both replace layer {at.written.layer}, {at.written.site}: "
                "expected one for each hook point; leave one out"
            )
        written[at.written] = at.name


class TogetherPass(CleanPass):
    """A clean pass that keeps the activations at all hook points of several SAEs, to be spliced at once."""

    def __init__(
        self, passes: Passes, windows: Sequence[StoredWindow], acts: Sequence[Hooked]
    ) -> None:
        points = tuple(dict.fromkeys(point for at in acts for point in (at.read, at.written)))
        super().__init__(passes, windows, points, points)
        self.acts = acts
        at_points = dict(zip(points, self.x.chunk(len(points), 1), strict=True))
        self.rows_of = [(at_points[at.read], at_points[at.written]) for at in acts]  # x, y of each

    def together(self, predict: Predict) -> Tensor:
        """The inputs of the head, (n, d_model), with `predict(number, x, y)`, (n, E), in place of the activations y
        that the SAE of that number replaces, given x, (n, D), that it reads, both of this pass; differentiable."""
        read: dict[int, Tensor] = {}

        def hook(point: HookPoint, activations: Tensor) -> Tensor:
            for number, at in enumerate(self.acts):
                if at.written != point:
                    continue
                y = self.replaced_rows(activations)
                x = y if at.read == point else read.get(number)
                if x is None:
                    raise ConfigError(
                        f"cannot splice {at.name}: it reads layer {at.read.layer}, {at.read.site} after layer "
                        f"{at.written.layer}, {at.written.site}, which it predicts; leave it out"
                    )
                activations = self.with_rows(activations, predict(number, x, y))
            for number, at in enumerate(self.acts):  # what the one that writes here has left
                if at.read == point and at.written != point:
                    read[number] = self.replaced_rows(activations)
            return activations

        return self.changed(self.writes, hook)

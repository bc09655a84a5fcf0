"""The modules of a model that can be read, by name; `sae extract --list-modules`."""

import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..base.devices import device_named
from .hooks import Modules, first_tensor, folded, is_of_tokens
from .language_model import LanguageModel
from .model_source import find_model
from .options import SIDES

WINDOWS, TOKENS = 2, 5  # of the forward pass


def modules_document(
    model: str, revision: str | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Run a model over a few tokens, and describe the modules that ran.

    Returns:
        `model`, and as `modules`, in the model's order, each with its name, `*` for the number of a layer or an expert,
        the `layers` that have it so, none outside of blocks, and as `in` and `out` None or the `shape` of the first
        tensor there, of 2 windows of 5 tokens, the dimensions `d_in` of its rows, None if it is no hook point, and
        the `site` that it is.
    """
    loaded = LanguageModel(find_model(model, revision), device_named(device))
    modules = loaded.modules
    shapes: dict[tuple[str, str], Tensor] = {}
    with torch.no_grad():
        hooks = []
        for path, module in modules.model.named_modules():

            def note(
                _: nn.Module, args: tuple, kwargs: dict, output: Any, path: str = path
            ) -> None:
                given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
                returned = dict(enumerate(output if isinstance(output, tuple) else [output]))
                for side, parts in (("in", given), ("out", returned)):
                    key = first_tensor(parts)
                    if key is not None:
                        shapes[path, side] = parts[key]

            hooks.append(module.register_forward_hook(note, with_kwargs=True))
        try:
            ones = torch.ones(WINDOWS, TOKENS, dtype=torch.int64)
            loaded.forward(ones, ones)
        finally:
            for hook in hooks:
                hook.remove()
    return {"model": loaded.source.name, "modules": _lines(modules, shapes)}


@dataclass(frozen=True)
class Side:
    """The input or output of a module."""

    shape: tuple[int, ...]
    d_in: int | None
    site: str | None

    @classmethod
    def of(cls, tensor: Tensor | None, site: str | None) -> Self | None:
        if tensor is None:
            return None
        d_in = tensor.shape[-1] if is_of_tokens(tensor, [WINDOWS, TOKENS]) else None
        return cls(tuple(tensor.shape), d_in, site)


def _lines(modules: Modules, tensors: dict[tuple[str, str], Tensor]) -> list[dict[str, Any]]:
    sites = modules.sites()
    layers: dict[tuple[str, Side | None, Side | None], list[int]] = defaultdict(list)
    for path in dict.fromkeys(path for path, _ in tensors if path):
        given, returned = (
            Side.of(tensors.get((path, side)), sites.get((path, side))) for side in SIDES
        )
        own = layers[folded(modules.name(path)), given, returned]
        match = re.match(rf"{re.escape(modules.path)}\.(\d+)(?:\.|$)", path)
        if match is not None and int(match[1]) not in own:
            own.append(int(match[1]))
    return [
        {
            "module": name,
            "layers": own,
            "in": given and asdict(given),
            "out": returned and asdict(returned),
        }
        for (name, given, returned), own in layers.items()
    ]

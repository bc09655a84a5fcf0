"""The modules of a model that can be read, by name; `sae extract --list-modules`."""

import re
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base.devices import device_named
from .hooks import first_tensor, folded, is_of_tokens
from .language_model import LanguageModel
from .model_source import find_model
from .options import SIDES

WINDOWS, TOKENS = 2, 5  # of the forward pass


@torch.no_grad()
def modules_document(model: str, revision: str | None, device: str) -> dict[str, Any]:
    """Run a model over a few tokens, and describe the modules that ran.

    Returns:
        `model`, and as `modules`, in the order in which they end, each with its name, `*` for the number of a layer or
        an expert, the `layers` that have it so, none outside of blocks, and as `in` and `out` None or the `shape` of
        the first tensor there, of 2 windows of 5 tokens, the dimensions `d_in` of its rows, None if it is no hook
        point, and the `site` that it is.
    """
    loaded = LanguageModel(find_model(model, revision), device_named(device))
    modules = loaded.modules
    in_block = re.compile(rf"{re.escape(modules.path)}\.(\d+)(?:\.|$)")
    lines: list[dict[str, Any]] = []

    def note(path: str, _: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        line: dict[str, Any] = {"module": folded(modules.name(path)), "layers": []}
        returned = output if isinstance(output, tuple) else (output,)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for side, values in zip(SIDES, (given, dict(enumerate(returned))), strict=True):
            line[side] = None
            if (key := first_tensor(values)) is not None:
                shape = list(values[key].shape)
                d_in = shape[-1] if is_of_tokens(values[key], [WINDOWS, TOKENS]) else None
                line[side] = {"shape": shape, "d_in": d_in, "site": modules.sites.get((path, side))}
        alike = (other for other in lines if {**other, "layers": []} == line)
        line = next(alike, line)
        if line not in lines:
            lines.append(line)
        layer = in_block.match(path)
        if layer is not None and int(layer[1]) not in line["layers"]:
            line["layers"].append(int(layer[1]))

    with ExitStack() as hooks:
        for path, module in modules.model.named_modules():
            if path:
                hook = module.register_forward_hook(partial(note, path), with_kwargs=True)
                hooks.enter_context(hook)
        ones = torch.ones(WINDOWS, TOKENS, dtype=torch.int64)
        loaded.forward(ones, ones)
    return {"model": loaded.source.name, "modules": lines}

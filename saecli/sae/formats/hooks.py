"""Other tools' names of hook points; README.md has a table.

TransformerLens' follow `blocks.L.`; those of transformers' modules `layers.L.` or `h.L.`, and end there with `.input`
or `.output`, here with `:in` or `:out`. A hook point that is no site keeps its name. Some are sites in some models
only: see `model.families`.

Sources: `components/rms_norm.py`, `layer_norm.py`, `transformer_block.py` and `HookedTransformer.py` of TransformerLens
2.18 and 3.9; `replacement_model_transformerlens.py` and `utils/tl_nnsight_mapping.py` of circuit-tracer 0.5.0.
"""

import re
from typing import Any

from ...store.origin import HookPoint

TRANSFORMER_LENS = {  # sites by its names, exact in all models
    "hook_resid_pre": "resid_pre",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "hook_resid_mid": "resid_mid",
    "mlp.hook_in": "mlp_in",
}
Z = "attn.hook_z"
HOOKS = {site: hook for hook, site in TRANSFORMER_LENS.items()} | {"attn_z": Z}
NORMALIZED = "ln2.hook_normalized"  # `mlp_in` before the norm's weight and bias
SIDE_OF = {"input": "in", "output": "out"}
ENDINGS = (":in", ":out")
MODULES = {  # sites by transformers' names with their side, exact in all models
    ":in": "resid_pre",
    ":out": "resid_post",
    "mlp:in": "mlp_in",
    "pre_feedforward_layernorm:out": "mlp_in",
    "post_feedforward_layernorm:out": "mlp_out",
    "self_attn.o_proj:in": "attn_z",
    "attn.c_proj:in": "attn_z",
    "attention.dense:in": "attn_z",
    "self_attn.out_proj:in": "attn_z",
}

_HOOK = re.compile(r"blocks\.(\d{1,9})\.(\S+)")
_MODULE = re.compile(r"(?:\S+\.)?(?:layers|h)\.(\d{1,9})(?:\.(\S+))?")


def point_of_hook(name: Any) -> HookPoint | None:
    """The hook point of TransformerLens' name, if it is one."""
    match = _HOOK.fullmatch(name) if isinstance(name, str) else None
    return match and HookPoint(int(match[1]), TRANSFORMER_LENS.get(match[2], match[2]))


def hook_name(point: HookPoint | None) -> str | None:
    """TransformerLens' name, if it has one; a module's with its side."""
    if point is None:
        return None
    if ":" in point.site:
        return point.site if point.layer is None else f"layers.{point.layer}.{point.site}"
    hook = HOOKS.get(point.site, point.site)
    return f"blocks.{point.layer}.{hook}" if point.layer is not None and "hook_" in hook else None


def point_of_module(name: Any, side: str = "") -> HookPoint | None:
    """The hook point of a module in transformers, on its `side` if it names none; None for other names."""
    match = _MODULE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return HookPoint(None, name) if isinstance(name, str) and name.endswith(ENDINGS) else None
    layer = int(match[1])
    if name.endswith(ENDINGS):
        return HookPoint(layer, match[2])
    module = ".".join(part for part in (match[2], side) if part)
    path, _, end = module.rpartition(".")
    if end in SIDE_OF:
        module = f"{path}:{SIDE_OF[end]}"
    return HookPoint(layer, MODULES.get(module, module))

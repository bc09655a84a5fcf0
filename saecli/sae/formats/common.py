"""Common to all formats: an SAE with its origin, names of tensors and hook points, files read without running code.

Encoders that subtract the decoder bias from rows: `(x - b_dec) @ W_enc + b = x @ W_enc + (b - b_dec @ W_enc)`.
Shapes: D = d_in, E = d_out, F = d_sae.

TransformerLens' hook points follow `blocks.L.`; transformers' modules `layers.L.` or `h.L.`, and end with `.input` or
`.output`, here with `:in` or `:out`. A hook point that is no site keeps its name; some are sites in some models only,
see `model.families`. README.md has a table.

Sources: `components/rms_norm.py`, `layer_norm.py`, `transformer_block.py` and `HookedTransformer.py` of TransformerLens
2.18 and 3.9; `replacement_model_transformerlens.py` and `utils/tl_nnsight_mapping.py` of circuit-tracer 0.5.0.
"""

import fnmatch
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from annotated_types import Gt, Lt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...base.errors import ConfigError, FormatError, one_line
from ...base.files import appearing_whole, parse_json, read_json, to_json
from ...store.arrays import check_memory, load_torch, naming
from ...store.origin import HookPoint, ModelName, Origin
from ..activations import Activation, Thresholded
from ..codes import Prefixes
from ..dictionary import SAE

ParsedConfig = TypeVar("ParsedConfig")
Configured = TypeVar("Configured")

WEIGHTS = ("W_enc", "b_enc", "W_dec", "b_dec")
PLAIN = {name: name for name in WEIGHTS}
ENCODER = {"encoder.weight": "W_enc.T", "encoder.bias": "b_enc"}  # of an nn.Linear
LINEAR = ENCODER | {"decoder.weight": "W_dec.T"}
SKIP = {"W_skip": "W_skip.T"}  # of libraries that compute `x @ W_skip.T`
THRESHOLD = {"threshold": "threshold"}
GATED = {name: name for name in ("W_enc", "b_gate", "r_mag", "W_dec", "b_dec")}
GATED["b_mag"] = "b_enc"
TO_FIT = "end other programs, or read it on a machine with more"

MODELS = {  # TransformerLens' and Gemma Scope 2's names, and the hub's
    "gpt2-small": "gpt2",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    r"(google/)?gemma-v?3-(270m|\w+-\w+)(-pt)?": r"google/gemma-3-\2",
    r"gemma-2?-?\d+b(-it)?": r"google/\g<0>",
    r"pythia-[\d.]+[mb](-deduped)?": r"EleutherAI/\g<0>",
}

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


@dataclass(frozen=True)
class Metric:
    scale: list[Annotated[float, Gt(0), Lt(1e30)]] | None = None


@dataclass(frozen=True)
class SavedSAE:
    """An SAE as a folder has it."""

    sae: SAE
    origin: Origin = field(default_factory=Origin)
    transcodes: bool = False  # whether the file calls it a transcoder
    scaled: bool = False  # whether it takes scaled rows, by a factor that the file lacks
    processing: dict[str, Any] = field(default_factory=dict)  # options of TransformerLens' model
    remarks: tuple[str, ...] = ()  # what its user should know, each a predicate

    @property
    def is_transcoder(self) -> bool:
        """By record or weights."""
        return (
            self.transcodes
            or self.origin.written is not None
            or self.origin.target is not None
            or self.sae.W_skip is not None
            or self.sae.d_out != self.sae.d_in
        )


def assemble(
    path: Path,
    tensors: Mapping[str, Tensor],
    activation: Activation,
    subtracts: bool = False,
    prefixes: Prefixes = (),
    transcodes: bool = False,
    widths: tuple[int, ...] = (),
) -> SAE:
    """An SAE of tensors by this tool's names, in at least float32; FormatError if anything does not fit.

    `subtracts`: whether the encoder subtracts `b_dec` from rows; `transcodes`: whether any output width and W_skip are
    allowed. Of gates, see `GATED`, the encoder becomes the magnitudes'.
    """
    tensors = dict(tensors)
    gated = "b_gate" in tensors
    if gated:
        tensors["threshold"] = tensors.pop("b_gate")
    skip = ["W_skip"] if transcodes and "W_skip" in tensors else []
    names = (*WEIGHTS, *activation.parameters(1), *skip)
    tensors = renamed(path, tensors, {name: name for name in names})
    d_in, d_sae, d_out = _check_shapes(path, tensors, activation, transcodes)
    rise = all(before < after for before, after in pairwise((0, *prefixes)))
    if prefixes and (prefixes[-1] != d_sae or not rise):
        raise FormatError(
            f"{path}: expected prefixes that rise to d_sae, {d_sae}, got {list(prefixes)}"
        )
    if widths and (min(widths) < 1 or sum(widths) != d_in or d_out != d_in):
        raise FormatError(
            f"{path}: expected widths of hook points that sum to {d_in}, got {list(widths)}"
        )
    dtype = torch.promote_types(tensors["W_enc"].dtype, torch.float32)
    copied = [
        tensor for tensor in tensors.values() if tensor.dtype != dtype or not tensor.is_contiguous()
    ]
    check_memory(str(path), sum(tensor.numel() for tensor in copied) * dtype.itemsize, TO_FIT)
    with_config(path, activation.check, d_sae=d_sae)
    ready = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    W_enc, b_enc, W_dec, b_dec = (ready.pop(name) for name in WEIGHTS)
    W_skip = ready.pop("W_skip", None)
    parts: dict[str, Any] = {"prefixes": prefixes, "W_skip": W_skip, "widths": widths}
    sae = SAE(W_enc, b_enc, W_dec, b_dec, activation, ready, **parts)
    if gated:
        slopes = ready["r_mag"].double().exp()
        threshold = sae.b_enc - slopes * ready["threshold"]
        sae = sae.changed(W_enc=(W_enc * slopes).to(dtype), threshold=threshold.to(dtype))
    if not subtracts:
        return sae
    shift = sae.b_dec.double() @ sae.W_enc.double()
    return sae.changed(b_enc=(sae.b_enc.double() - shift).to(dtype))


def _check_shapes(
    path: Path, tensors: Mapping[str, Tensor], activation: Activation, transcodes: bool
) -> tuple[int, int, int]:
    """D, F and E; FormatError for tensors that do not fit."""
    W_enc, b_dec = tensors["W_enc"], tensors["b_dec"]
    if W_enc.ndim != 2 or not W_enc.numel():
        raise FormatError(
            f"{path}: expected W_enc of shape (d_in, d_sae), both at least 1, got {tuple(W_enc.shape)}"
        )
    d_in, d_sae = W_enc.shape
    d_out = d_in
    if transcodes and b_dec.shape == tensors["W_dec"].shape[1:]:
        d_out = len(b_dec)
    shapes = {
        "W_enc": (d_in, d_sae),
        "b_enc": (d_sae,),
        "W_dec": (d_sae, d_out),
        "b_dec": (d_out,),
        "W_skip": (d_in, d_out),
    }
    shapes |= {name: tuple(start.shape) for name, start in activation.parameters(d_sae).items()}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise FormatError(
                f"{path}: expected {name} of shape {shapes[name]}, got {tuple(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise FormatError(f"{path}: expected floating-point {name}, got {tensor.dtype}")
    return d_in, d_sae, d_out


def check_finite(path: Path, sae: SAE) -> None:
    for name, tensor in sae.tensors().items():
        if not tensor.isfinite().all():
            raise FormatError(f"{path}: expected finite numbers in {name}; the file is damaged")


def unscaled(sae: SAE, factor: float, target_factor: float | None = None) -> SAE:
    """An SAE that takes `factor * x` and predicts `target_factor * y`, by default equal, on raw rows x."""
    target_factor = factor if target_factor is None else target_factor
    if not (0 < factor < math.inf and 0 < target_factor < math.inf):
        raise ValueError(
            f"expected positive factors of rows and targets, got {factor} and {target_factor}"
        )
    scale = torch.full((sae.d_in + sae.d_out,), 1 / factor)
    scale[sae.d_in :] = 1 / target_factor
    return sae.on_raw_rows(replace(sae.normalisation, scale=scale))


def with_unit_rows(sae: SAE) -> SAE:
    """With unit decoder rows, and their norms in the encoder; a latent with a zero row then never fires."""
    norms = sae.W_dec.norm(dim=1)
    W_dec = sae.W_dec / norms.masked_fill(norms == 0, 1)[:, None]
    W_dec[norms == 0, 0] = 1
    return sae.changed(W_enc=sae.W_enc * norms, b_enc=sae.b_enc * norms, W_dec=W_dec)


def renamed(
    path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """A file's tensors by this tool's names: `names` has this tool's for each of the file's, with `.T` after it if the
    file stores the transpose."""
    if tensors.keys() != names.keys():
        raise FormatError(
            f"{path}: expected the tensors {sorted(names)}, got {sorted(tensors)}; missing "
            f"{sorted(names.keys() - tensors.keys())}, unexpected {sorted(tensors.keys() - names.keys())}"
        )
    ours = {}
    for name, stored_as in names.items():
        transposed = stored_as.endswith(".T") and tensors[name].ndim == 2
        ours[stored_as.removesuffix(".T")] = tensors[name].T if transposed else tensors[name]
    return ours


def metric_of(sae: SAE) -> dict[str, Any]:
    return {} if sae.scale is None else {"scale": sae.scale.tolist()}


def take_metric(sae: SAE, entry: str | bytes) -> None:
    """Take the scales in a JSON object, if any; ValueError unless they are positive, one per dimension."""
    scale = parse_json(entry, Metric).scale
    if scale is not None:
        if len(scale) != sae.d_in + sae.d_out:
            raise ValueError(f"expected {sae.d_in + sae.d_out} numbers in scale, got {len(scale)}")
        sae.scale = torch.tensor(scale).to(sae.W_enc)


def disassembled(sae: SAE, names: Mapping[str, str], subtracts: bool = False) -> dict[str, Tensor]:
    """The inverse of `renamed` and `assemble`, for the names that the SAE has; a `Thresholded` activation's threshold
    for each latent."""
    tensors = sae.tensors()
    if isinstance(sae.activation, Thresholded):
        thresholds = sae.activation.thresholds(sae.activation_parameters, sae.d_sae)
        tensors["threshold"] = thresholds.to(sae.W_enc.dtype)
    if subtracts:
        shift = sae.b_dec.double() @ sae.W_enc.double()
        tensors["b_enc"] = (sae.b_enc.double() + shift).to(sae.b_enc.dtype)
    theirs = {}
    for name, ours in names.items():
        tensor = tensors.get(ours.removesuffix(".T"))
        if tensor is not None:
            theirs[name] = tensor.T if ours.endswith(".T") else tensor
    return theirs


def with_config(path: Path, kind: Callable[..., Configured], **settings: Any) -> Configured:
    """`kind(**settings)`; FormatError for settings that do not fit."""
    try:
        return kind(**settings)
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error


def names_like(names: Iterable[str], pattern: str) -> list[str]:
    """Names that match a pattern of files; `*` matches no slash."""
    matches = (name for name in names if fnmatch.fnmatchcase(name, pattern))
    return [name for name in matches if name.count("/") == pattern.count("/")]


def read_config(path: Path, kind: type[ParsedConfig]) -> ParsedConfig:
    try:
        return read_json(path, kind)
    except (OSError, ValueError) as error:
        raise FormatError(f"cannot read {path}: {error}") from error


def models_named(name: Any) -> tuple[ModelName, ...]:
    """A model under its name on the hub; none for what is no name."""
    if not isinstance(name, str):
        return ()
    for pattern, on_hub in MODELS.items():
        if match := re.fullmatch(pattern, name):
            return (ModelName(match.expand(on_hub)),)
    return (ModelName(name),)


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


def origin_of(
    model: Any, read: HookPoint | None, written: HookPoint | None = None, **text: Any
) -> Origin:
    """An origin of a model by another library's name; `text`: further fields."""
    return Origin(models_named(model), (read or HookPoint(),), written, **text)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with naming(str(path), TO_FIT), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return tensors, file.metadata() or {}


def read_header(path: Path) -> dict[str, str]:
    with naming(str(path), TO_FIT), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def read_renamed(path: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    return renamed(path, read_safetensors(path)[0], names)


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a `torch.save` file, read with `weights_only`."""
    with naming(str(path), TO_FIT):
        tensors = load_torch(path)
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in tensors.items()
    ):
        raise FormatError(
            f"{path}: expected a state_dict, tensors by name, got {type(tensors).__name__}"
        )
    return tensors


def read_npz(path: Path) -> dict[str, Tensor]:
    with (
        naming(str(path), TO_FIT),
        path.open("rb") as file,  # which NumPy leaves open if it is damaged
        np.load(file, allow_pickle=False) as arrays,
    ):
        check_memory(str(path), sum(member.file_size for member in arrays.zip.infolist()), TO_FIT)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str] | None = None,
    save: Callable[..., None] = save_file,
) -> None:
    """Atomic; OSError if the disk refuses."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with appearing_whole(path) as temporary:
        try:
            save(ready, temporary, **({} if metadata is None else {"metadata": metadata}))
        except (SafetensorError, RuntimeError) as error:  # neither library raises an OSError
            if match := re.search(r"\(os error (\d+)\)", str(error)):
                number = int(match[1])
                raise OSError(number, os.strerror(number), str(path)) from error
            raise OSError(f"cannot write {path}: {one_line(error)}") from error


def write_sae(path: Path, sae: SAE, names: Mapping[str, str], subtracts: bool = False) -> None:
    """By another library's names; the metric is the header's one entry, as several change their order."""
    header = None if sae.scale is None else {"saecli": to_json(metric_of(sae))}
    write_tensors(path, disassembled(sae, names, subtracts), header)


def refuse_unless(path: Path, config: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """FormatError for an entry with which the SAE computes what cannot be expressed here; missing: the first."""
    value = config.get(key, allowed[0])
    if (type(value), value) not in [(type(known), known) for known in allowed]:
        raise FormatError(
            f"{path}: {key} {value!r} cannot be expressed here; expected {' or '.join(map(repr, allowed))}"
        )

"""SAEs in folders, in this tool's own format and in other libraries'; no format runs code from a file.

    common.py           SavedSAE, names of tensors and hook points, reading and writing of files
    libraries.py        SAELens, sparsify, dictionary_learning
    circuit_tracer.py   circuit-tracer, also sets of one transcoder per layer
    scopes.py           published suites, which are only read

README.md says what each can express. To add one, write `saecli/sae/formats/NAME.py` and a line in `FORMATS`.

This tool's own format, `native`, is one file, `sae.safetensors`, of an SAE on raw activations. It MUST hold W_enc
(d_in, d_sae), b_enc, W_dec (d_sae, d_out) and b_dec in one floating dtype, the activation's parameters, and W_skip
(d_in, d_out) of a transcoder with a skip. The header's entry `saecli` is a JSON object with `format_version`,
`activation` and `origin`; it MAY have `prefixes` (numbers of latents) of a nested SAE, `widths` of a crosscoder,
`transcodes`, a boolean, and `scale`, d_in + d_out positive numbers by which training divided rows and targets: the
metric of its errors and directions. Exports have that too.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from ...base.errors import FormatError, one_line
from ...base.files import demand_version, folder_appearing_whole, is_free, parse_json, to_json
from ...store.origin import Origin, OriginEntries
from ..activations import (
    ACTIVATIONS,
    Activation,
    Gated,
    JumpRelu,
    ReluTopK,
    TopK,
    activation_from_json,
    activation_to_json,
)
from ..dictionary import SAE
from . import circuit_tracer, common, libraries, scopes
from .common import SavedSAE

NATIVE_VERSION = 1
NATIVE_FILE = "sae.safetensors"


@dataclass(frozen=True)
class Header:
    """The entry `saecli`."""

    activation: dict[str, Any]
    origin: OriginEntries
    prefixes: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    transcodes: bool = False


def save_native(saved: SavedSAE, folder: Path) -> None:
    origin = saved.origin.to_json()
    header = {
        "format_version": NATIVE_VERSION,
        "activation": activation_to_json(saved.sae.activation),
        "origin": {name: entry for name, entry in origin.items() if entry is not None},
        "prefixes": saved.sae.prefixes,
        "widths": saved.sae.widths,
        "transcodes": saved.is_transcoder,
        **common.metric_of(saved.sae),
    }
    common.write_tensors(folder / NATIVE_FILE, saved.sae.tensors(), {"saecli": to_json(header)})


def load_native(folder: Path) -> SavedSAE:
    """FormatError also for a file of a newer version."""
    path = folder / NATIVE_FILE
    tensors, metadata = common.read_safetensors(path)
    if "saecli" not in metadata:
        raise FormatError(
            f"{path} was not written by this tool: expected an entry `saecli` in its header, got none"
        )
    try:
        demand_version(metadata["saecli"], NATIVE_VERSION)
        header = parse_json(metadata["saecli"], Header)
        activation = activation_from_json(header.activation)
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error
    sae = common.assemble(path, tensors, activation, False, header.prefixes, True, header.widths)
    return SavedSAE(sae, Origin.of(header.origin), header.transcodes)


@dataclass(frozen=True)
class Format:
    """How SAEs are kept in files."""

    files: tuple[str, ...]  # patterns of one SAE's, the weights last
    load: Callable[[Path], SavedSAE]  # from a folder, or if `by_layer` from a file
    save: Callable[[SavedSAE, Path], Any] | None = None  # in float32, to a folder; None: only read
    activations: Collection[type[Activation]] = ()  # that `save` can express
    transcoders: Collection[type[Activation]] = ()  # the same of transcoders
    one_width: bool = False  # whether a transcoder's targets must be as wide as its rows
    by_layer: bool = False  # whether a folder has a file of weights, an SAE, for each layer
    optional: str = ""  # pattern of further files, read if they are there
    # FormatError unless SAEs, of each what `save` returns, may share a folder; None: it holds one.
    demand_set: Callable[[Sequence[Any]], None] | None = None

    def lacks(self, saved: SavedSAE) -> str | None:
        """What `save` cannot express, and what it can; None if nothing."""
        sae = at_inference(saved.sae)
        able = self.transcoders if saved.is_transcoder else self.activations
        if not able:
            return "a transcoder" if saved.is_transcoder else "an SAE that is no transcoder"
        if sae.widths and self.save is not save_native:
            return "a crosscoder, whose latents read several hook points"
        if type(sae.activation) not in able:
            of = " of a transcoder" if saved.is_transcoder else ""
            names = ", ".join(activation.name for activation in able)
            return f"the activation {saved.sae.activation.name}{of}; expected one of {names}"
        if self.one_width and sae.d_out != sae.d_in:
            return f"targets of {sae.d_out} dimensions predicted from rows of {sae.d_in}; expected equal widths"
        return None


# The first whose files are all present is used: sparsify before native.
FORMATS: dict[str, Format] = {
    "saelens": Format(
        (libraries.SAELENS_CONFIG, libraries.SAELENS_WEIGHTS),
        libraries.load_saelens,
        libraries.save_saelens,
        libraries.ARCHITECTURES,
        libraries.TRANSCODERS,
        optional=libraries.SAELENS_SCALER,
    ),
    "sparsify": Format(
        (libraries.SPARSIFY_CONFIG, libraries.SPARSIFY_WEIGHTS),
        libraries.load_sparsify,
        libraries.save_sparsify,
        libraries.SPARSIFY_WRITTEN,
        libraries.SPARSIFY_WRITTEN,
        one_width=True,
    ),
    "dictionary-learning": Format(
        (libraries.LEARNING_CONFIG, libraries.LEARNING_WEIGHTS),
        libraries.load_dictionary_learning,
        libraries.save_dictionary_learning,
        libraries.LEARNING_WRITTEN,
    ),
    "gemma-scope": Format((scopes.GEMMA_ARRAYS,), scopes.load_gemma_scope),
    "gemma-scope-2": Format(
        (scopes.GEMMA_WEIGHTS,), scopes.load_gemma_scope_2, optional=scopes.CONFIG
    ),
    "gemma-scope-2-crosscoder": Format(
        (scopes.CONFIG, scopes.GEMMA_LAYER.format(0)),
        scopes.load_gemma_scope_2_crosscoder,
        optional=scopes.GEMMA_LAYER.format("[1-9]*"),
    ),
    "llama-scope": Format((scopes.LLAMA_CONFIG, scopes.LLAMA_WEIGHTS), scopes.load_llama_scope),
    "llama-scope-r1": Format(
        (scopes.CONFIG, libraries.SAELENS_WEIGHTS), scopes.load_llama_scope_r1
    ),
    "qwen-scope": Format((scopes.QWEN_WEIGHTS,), scopes.load_qwen_scope, by_layer=True),
    "goodfire": Format((scopes.GOODFIRE_WEIGHTS,), scopes.load_goodfire, by_layer=True),
    "attention-heads": Format((scopes.HEADS_WEIGHTS,), scopes.load_attention_heads, by_layer=True),
    "circuit-tracer": Format(
        (circuit_tracer.CONFIGS, circuit_tracer.LAYER_FILES),
        circuit_tracer.load_circuit_tracer,
        circuit_tracer.save_circuit_tracer,
        (),
        circuit_tracer.WRITTEN,
        one_width=True,
        by_layer=True,
        demand_set=circuit_tracer.demand_set,
    ),
    "native": Format(
        (NATIVE_FILE,), load_native, save_native, ACTIVATIONS.values(), ACTIVATIONS.values()
    ),
}
Fold = Callable[[SavedSAE], SavedSAE]
# What entries of damaged files raise where they are used.
DAMAGE = (RuntimeError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
WRITABLE = tuple(name for name, form in FORMATS.items() if form.save is not None)


def at_inference(sae: SAE) -> SAE:
    """A `gated` SAE as the `jumprelu` that it is without training; others as they are."""
    if not isinstance(sae.activation, Gated):
        return sae
    threshold = sae.activation.thresholds(sae.activation_parameters, sae.d_sae)
    return sae.changed(JumpRelu(), threshold=threshold)


def stand_in(saved: SavedSAE, name: str) -> SavedSAE | None:
    """The `relu-topk` that a format can express of a `topk` that it cannot; else None."""
    activation, form = saved.sae.activation, FORMATS[name]
    if not isinstance(activation, TopK) or not form.lacks(saved):
        return None
    clipped = replace(saved, sae=saved.sae.changed(activation=ReluTopK(k=activation.k)))
    return None if form.lacks(clipped) else clipped


class Found(NamedTuple):
    """An SAE among files."""

    name: str  # of its format
    files: list[str]  # the weights last


def found_among(paths: Iterable[str]) -> dict[str, Found]:
    """The SAEs among files, by folder, or by file of weights where a folder has one for each layer."""
    folders: dict[PurePosixPath, list[str]] = {}
    for path in map(PurePosixPath, paths):
        for folder in [*path.parents][:2]:  # a pattern may name a file in a folder
            folders.setdefault(folder, []).append(str(path.relative_to(folder)))
    found: dict[str, Found] = {}
    for folder, names in sorted(folders.items()):
        for name, form in FORMATS.items():
            matches = [common.names_like(names, pattern) for pattern in form.files]
            if not all(matches):
                continue
            *others, weights = matches
            shared = [*chain(*others), *common.names_like(names, form.optional)]
            for file in weights:
                key = folder / file if form.by_layer else folder
                files = [str(folder / each) for each in (*shared, file)]
                found[str(key)] = Found(name, files)
            break
    return found


def found_at(path: Path) -> dict[str, Found]:
    """The SAEs in a folder, by path from there, or in a layer's file."""
    folder = path.parent if path.is_file() else path
    patterns = {pattern for form in FORMATS.values() for pattern in form.files}
    matches = {match for pattern in patterns for match in folder.glob(pattern)}
    found = found_among(
        match.relative_to(folder).as_posix() for match in matches if match.is_file()
    )
    return {key: each for key, each in found.items() if path.is_dir() or key == path.name}


def recognise(path: Path) -> str | None:
    """The format of the SAEs in a folder or a layer's file, if known."""
    return next((each.name for each in found_at(path).values()), None)


def known_files() -> str:
    return "; ".join(f"{' and '.join(form.files)} ({name})" for name, form in FORMATS.items())


def load(
    path: Path,
    row_scale: float | None = None,
    processing: Mapping[str, Any] | None = None,
    fold: Fold = lambda saved: saved,
) -> SavedSAE:
    """Read the SAE in a folder, or in a layer's file.

    row_scale, processing: what a file lacks and a registry says; fold: `model.saes.fold_in`.
    """
    found = found_at(path)
    if len(found) > 1:
        raise FormatError(f"{path} holds {len(found)} SAEs: name one, such as {path / min(found)}")
    if not found:
        got = "no folder"
        if path.is_dir():
            names = sorted(entry.name for entry in path.iterdir())
            got = ", ".join(names[:8]) or "an empty folder"
        raise FormatError(f"no SAE found in {path}; expected {known_files()}, got {got}")
    ((name, files),) = found.values()
    form = FORMATS[name]
    weights = path if path.is_file() else path / files[-1]
    path = weights if form.by_layer else path
    saved = _read(path, weights, form)
    if processing is not None:
        saved = replace(saved, processing=saved.processing | dict(processing))
    saved = fold(saved)
    if saved.scaled:
        if row_scale is None:
            raise FormatError(
                f"{path} does not say by how much its rows are scaled (expected_average_only_in): name it by "
                "SAELens' release and id, such as gemma-2b-res-jb/ID, which say it; install sae-lens"
            )
        saved = replace(saved, sae=common.unscaled(saved.sae, row_scale), scaled=False)
    common.check_finite(path, saved.sae)
    return saved if name == "native" else _noting_threshold(saved)


def _read(path: Path, weights: Path, form: Format) -> SavedSAE:
    """FormatError for whatever a damaged file raises."""
    try:
        saved = form.load(path)
        if weights.suffix == ".safetensors":
            common.take_metric(saved.sae, common.read_header(weights).get("saecli", "{}"))
    except FormatError:
        raise
    except DAMAGE as error:
        raise FormatError(
            f"cannot read {path}: {one_line(error)}; check that the file is whole"
        ) from error
    return saved


def _noting_threshold(saved: SavedSAE) -> SavedSAE:
    if not saved.sae.activation.estimates_threshold:
        return saved
    threshold = saved.sae.activation_parameters["threshold"].item()
    if threshold > 0:
        return saved
    unset = (
        f"has no threshold ({threshold:g}) from training: every positive pre-activation fires, not {saved.sae.k} in a "
        "row; train it on by --init, or take a later checkpoint"
    )
    return replace(saved, remarks=(*saved.remarks, unset))


def save(saved: SavedSAE, name: str, folder: Path) -> None:
    """Write an SAE; the folder, new or empty, appears whole or not at all."""
    save_all([saved], name, folder)


def save_all(saves: Iterable[SavedSAE], name: str, folder: Path) -> None:
    """`save`, of several as a set, one for each layer, if the format takes sets."""
    form, members = FORMATS[name], list[Any]()
    if not is_free(folder):
        raise FormatError(
            f"cannot write to {folder}: expected an empty or a new folder; name another"
        )
    with folder_appearing_whole(folder) as temporary:
        for saved in saves:
            lacking = form.lacks(saved)
            if lacking or form.save is None:
                able = [key for key, other in FORMATS.items() if not other.lacks(saved)]
                raise FormatError(
                    f"{name} cannot express {lacking}; it can be written as {' or '.join(able)}"
                )
            if name != "native":
                saved = replace(saved, sae=at_inference(saved.sae).copy_to(torch.float32))
            members.append(form.save(saved, temporary))
        if form.demand_set is not None and len(members) > 1:
            form.demand_set(members)

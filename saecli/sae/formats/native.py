"""This tool's own format: one file, `sae.safetensors`, of an SAE on raw activations.

It MUST hold W_enc (d_in, d_sae), b_enc, W_dec (d_sae, d_out) and b_dec in one floating dtype, the activation's
parameters, and W_skip (d_in, d_out) of a transcoder with a skip. The header's entry `saecli` is a JSON object with
`format_version`, `activation` and `origin`; it MAY have `prefixes` (numbers of latents) of a nested SAE, `widths` of a
crosscoder, `transcodes`, a boolean, and `scale`, a list of d_in + d_out positive numbers, by which training divided
rows and targets: the metric of its errors and directions, unknown without. Exports have that too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.documents import demand_version, parse_json
from ...base.errors import FormatError
from ...base.files import to_json
from ...store.origin import Origin, OriginEntries
from ..activations import activation_from_json, activation_to_json
from . import common
from .common import SavedSAE

NATIVE_VERSION = 1
NATIVE_FILE = "sae.safetensors"


@dataclass(frozen=True)
class Header:
    """The entry `saecli` of the header of this tool's own file."""

    activation: dict[str, Any]
    origin: OriginEntries
    prefixes: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    transcodes: bool = False


def save_native(saved: SavedSAE, folder: Path) -> None:
    header = {
        "format_version": NATIVE_VERSION,
        "activation": activation_to_json(saved.sae.activation),
        "origin": saved.origin.to_json(),
        "prefixes": saved.sae.prefixes,
        "widths": saved.sae.widths,
        "transcodes": saved.is_transcoder,
        **common.metric_of(saved.sae),
    }
    common.write_tensors(folder / NATIVE_FILE, saved.sae.tensors(), {"saecli": to_json(header)})


def load_native(folder: Path) -> SavedSAE:
    """Read an SAE; FormatError also for a file of a newer version."""
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

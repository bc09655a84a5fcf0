"""SAEs by their release and id in the registry of the installed SAELens."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import FormatError
from ..base.words import did_you_mean
from .hub import NAME, Address


class Registered(NamedTuple):
    """An SAE in SAELens' registry: its address, and what its file may lack, see `formats.SavedSAE`."""

    address: Address
    row_scale: float | None
    processing: dict[str, Any]


def registered(text: str) -> Registered | None:
    """The SAE that the installed SAELens names by this release/id; FormatError if it cannot be expressed here."""
    name, _, wanted = text.partition("/")
    release = _release(name)
    entries = [entry for entry in release.get("saes", ()) if entry["id"] == wanted]
    if not entries:
        return None
    overrides = release.get("config_overrides") or {}
    scaling = overrides.get("normalize_activations", "none")
    if scaling != "none":
        raise FormatError(
            f"{text} cannot be expressed here: each row is scaled by its own norm ({scaling}); use SAELens"
        )
    return Registered(
        Address(release["repo_id"], str(entries[0]["path"])),
        entries[0].get("norm_scaling_factor"),
        overrides.get("model_from_pretrained_kwargs") or {},
    )


def registry_hint(text: str) -> str:
    """What SAELens' registry has instead of an unknown SAE, or what to install if SAELens is missing."""
    name, _, wanted = text.partition("/")
    ids = [entry["id"] for entry in _release(name).get("saes", ())]
    if ids:
        question = did_you_mean(wanted, ids) or f"its first is {ids[0]}"
        return f"; SAELens' release {name} has {len(ids):,} SAEs, and is named as {name}/ID: {question}"
    if "/" in text and find_spec("sae_lens") is None:
        return "; for a release and id of SAELens, install sae-lens or name its place on the hub"
    return ""


def _release(name: str) -> dict[str, Any]:
    """A release in the registry, else empty; found in its text, as parsing it or importing SAELens takes seconds."""
    spec = find_spec("sae_lens")
    if spec is None or spec.origin is None or not re.fullmatch(NAME, name):
        return {}
    import yaml  # takes 20 ms to import, and most names are no release's

    path = Path(spec.origin).with_name("pretrained_saes.yaml")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    block = re.search(rf"^{re.escape(name)}:\n((?:[ -].*\n?)*)", text, re.MULTILINE)
    return yaml.load(block[1], getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if block else {}

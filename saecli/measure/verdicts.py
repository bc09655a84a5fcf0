"""`effects.json`, which `sae effects` keeps in a run's folder: outcomes of latents, and the verdicts on them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..base.errors import FormatError
from ..base.files import read_json, write_json

EFFECTS = "effects.json"


@dataclass(frozen=True)
class Outcome:
    """KL of a latent's changes and the rise of the tokens that it promotes, by id; (2, C, n) as in `effects.py`."""

    kl: list[list[list[float]]]
    rise: list[list[list[float]]]
    promoted: list[int]


@dataclass(frozen=True)
class Outcomes:
    settings: str  # what outcomes depend on
    latents: dict[int, Outcome] = field(default_factory=dict)
    verdicts: dict[int, str] = field(default_factory=dict)  # of the last command that tried each


def read_outcomes(path: Path) -> Outcomes | None:
    """None where there is no file; FormatError for a damaged one."""
    if not path.is_file():
        return None
    try:
        return read_json(path, Outcomes)
    except (OSError, ValueError) as error:
        raise FormatError(f"cannot read {path}: {error}; remove it to measure anew") from error


def add_verdicts(path: Path, verdicts: Mapping[int, str]) -> None:
    """Add verdicts to those in a file of outcomes, in place of earlier ones."""
    outcomes = read_outcomes(path)
    assert outcomes is not None  # `measured_outcomes` wrote it
    outcomes.verdicts.update(verdicts)
    write_json(path, asdict(outcomes))


def shown_verdicts(folder: Path | None) -> dict[int, str]:
    """The verdict on each latent that was tried, by the file in an SAE's folder."""
    outcomes = None if folder is None else read_outcomes(folder / EFFECTS)
    return {} if outcomes is None else outcomes.verdicts

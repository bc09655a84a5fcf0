"""The claims of REPORT.md: errors over errors with intervals over seeds, and verdicts by them."""

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measured import WAYS, Errors, Run, by_rows, select
from scipy import stats

ROWS = "{:,.0f} rows"
LEVEL = 0.02  # errors that differ by less of themselves count as the same
CONFIDENCE = 0.95  # of the intervals over seeds


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and its verdict here.

    Args:
        statement: the statement, in words of this page.
        verdict: "holds", "does not hold", or "holds when:" and the settings for which it does.
        evidence: the numbers behind it, in words.
        figure: the file of a picture.
    """

    statement: str
    verdict: str
    evidence: str
    figure: str


@dataclass(frozen=True)
class Ratio:
    """A mean ratio of two errors over seeds, and the factor to either end of its interval; 1 with one seed."""

    mean: float
    factor: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Ratio":
        """The geometric mean of the ratios seed by seed, with Student's interval of its logarithm."""
        logs = [math.log(above / below) for above, below in zip(ours, theirs, strict=True)]
        mean = statistics.mean(logs)
        if len(logs) == 1:
            return cls(math.exp(mean), 1.0)
        quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)
        return cls(
            math.exp(mean), math.exp(quantile * statistics.stdev(logs) / math.sqrt(len(logs)))
        )

    @property
    def is_lower(self) -> bool:
        """Whether our error is lower, by more than `LEVEL`, and by the whole interval."""
        return self.mean < 1 - LEVEL and self.mean * self.factor < 1

    def __str__(self) -> str:
        interval = f" ({self.mean / self.factor:.3g} to {self.mean * self.factor:.3g})"
        return f"{self.mean:.3g}{interval if self.factor > 1 else ''}"


def verdict(ratios: Mapping[str, Ratio]) -> str:
    """The verdict on "our errors are lower", given their ratios to a baseline's, by setting."""
    return part_verdict([setting for setting, ratio in ratios.items() if ratio.is_lower], ratios)


def part_verdict(where: Collection[str], of: Collection[str]) -> str:
    """The verdict on what holds in some of the settings."""
    if len(where) == len(of):
        return "holds"
    return f"holds when: {'; '.join(where)}" if where else "does not hold"


def listed(values: Mapping[str, Any], form: str = "{}") -> str:
    """Values by setting, in words."""
    return "; ".join(f"{setting}: {form.format(value)}" for setting, value in values.items())


def ratios(ours: Errors, theirs: Errors, form: str = "{:g}") -> dict[str, Ratio]:
    """Errors over errors seed by seed, by the values that both have, formatted."""
    return {
        form.format(value): Ratio.of(seeds, theirs[value])
        for value, seeds in ours.items()
        if len(theirs.get(value, ())) == len(seeds)
    }


@dataclass(frozen=True)
class Race:
    """Two ways whose errors are compared, and what the paper, or this tool, says of them."""

    ours: str
    theirs: str
    statement: str
    evidence: str


RACES = (
    Race(
        "paper",
        "sgd",
        "PAM-SGD reaches a lower test error than SGD, above all with few rows",
        "FVU over SGD's, both by the paper's settings",
    ),
    Race(
        "default",
        "sgd",
        "by this tool's defaults pam-sgd reaches a lower test error than the paper's SGD",
        "FVU over SGD's",
    ),
    Race(
        "default",
        "paper",
        "by this tool's defaults pam-sgd reaches a lower test error than the paper's PAM-SGD",
        "FVU over PAM-SGD's",
    ),
    Race(
        "default",
        "fair",
        "by this tool's defaults pam-sgd reaches a lower test error than sgd",
        "FVU over sgd's, both by defaults",
    ),
)


def efficiency_claims(
    found: Mapping[str, Mapping[str, Errors]],
    titles: Mapping[str, str],
    where: str,
    races: Sequence[Race] = RACES,
    form: str = ROWS,
    figure: str = "sizes.png",
) -> list[Claim]:
    """Claims on errors by activation and way, by training rows or by what `form` says."""
    claims = []
    for race in races:
        for act, title in titles.items():
            over = ratios(found[act][race.ours], found[act][race.theirs], form)
            if over:
                claims.append(
                    Claim(
                        f"{where}, {title}: {race.statement}",
                        verdict(over),
                        f"{race.evidence}: {listed(over)}",
                        figure,
                    )
                )
    return claims


def speed_claims(runs: Sequence[Run], titles: Mapping[str, str], where: str) -> list[Claim]:
    """Claims on how soon PAM-SGD has the test error that SGD ends with, by epochs and by time."""
    claims = []
    for act, title in titles.items():
        ours, theirs = (select(runs, group="base", act=act, way=way) for way in ("paper", "sgd"))
        pairs = [(pam, sgd) for pam in ours for sgd in theirs if pam.seed == sgd.seed]
        if not pairs:
            continue
        epochs = [reached(pam, sgd.final["test_fvu"]) for pam, sgd in pairs]
        shares = [
            epoch / len(sgd.curve()[0]) for epoch, (_, sgd) in zip(epochs, pairs, strict=True)
        ]
        times = [
            share * pam.document["result"]["seconds"] / sgd.document["result"]["seconds"]
            for share, (pam, sgd) in zip(shares, pairs, strict=True)
        ]
        claims.append(
            Claim(
                f"{where}, {title}: PAM-SGD converges faster than SGD, by epochs and by time",
                "holds" if max(shares + times) < 1 else "does not hold",
                "fraction of SGD's epochs, and of its time, until PAM-SGD has SGD's last test error, by seed: "
                + "; ".join(
                    f"{share:.2g}, {spent:.2g}" if math.isfinite(share) else "never"
                    for share, spent in zip(shares, times, strict=True)
                ),
                "curves.png",
            )
        )
    return claims


def reached(run: Run, level: float) -> float:
    """The first epoch after which the test FVU is at most a level; infinite if none is."""
    return next((epoch for epoch, fvu in zip(*run.curve(), strict=True) if fvu <= level), math.inf)


def sparsity_claims(runs: Sequence[Run], where: str, figure: str) -> list[Claim]:
    """The claim on relu's codes."""
    ways = {way: by_rows(select(runs, act="relu", way=way), "test_l0") for way in WAYS}
    dense = ratios(ways["paper"], ways["sgd"], ROWS)
    tools = ratios(ways["default"], ways["fair"], ROWS)
    if not dense:
        return []
    return [
        Claim(
            f"{where}: PAM-SGD's codes are sparser than SGD's, relu",
            verdict(dense),
            f"active latents over SGD's: {listed(dense)}. By the tool's defaults: {listed(tools)}. All at "
            "other errors",
            figure,
        )
    ]


def ablation_claims(over: Mapping[str, Mapping[str, Ratio]], where: str) -> list[Claim]:
    """Claims on weight decay and proximal weights, from errors relative to none."""
    words = {
        "decay": "weight decay lowers the test error",
        "proximal": "proximal weights mu and nu lower the test error",
    }
    return [
        Claim(
            f"{where}: {words[group]}",
            verdict(found),
            f"FVU over the FVU without: {listed(found)}",
            "ablations.png",
        )
        for group, found in over.items()
        if found
    ]


def geometry_claims(
    by_k: Mapping[int, Mapping[str, Any]], where: str, cells_figure: str, bridge_figure: str
) -> list[Claim]:
    """Claims on the cells of TopK SAEs, from what `sae geometry --json` printed, by K; none of none."""
    if not by_k:
        return []
    cells = {f"K = {k}": found["power_diagram"] for k, found in by_k.items()}
    errors = {
        f"K = {k}": [found["references"][f"{name}_fvu"] for name in ("kmeans", "sae", "local_pca")]
        for k, found in by_k.items()
    }
    agreed = {
        k: f"{of_k['agreement']:g} of {of_k['rows']:,} rows, {of_k['ties']} ties"
        for k, of_k in cells.items()
    }
    between = [k for k, (kmeans, sae, local_pca) in errors.items() if kmeans > sae > local_pca]
    in_words = {k: ", ".join(f"{fvu:.3f}" for fvu in of_k) for k, of_k in errors.items()}
    return [
        Claim(
            f"The cells of a TopK SAE are those of a K-th order power diagram{where}",
            part_verdict([k for k, of_k in cells.items() if of_k["agreement"] == 1], cells),
            f"fraction of rows in the cell of their K nearest sites: {listed(agreed)}",
            cells_figure,
        ),
        Claim(
            f"An SAE lies between k-means and local PCA in accuracy{where}",
            part_verdict(between, errors),
            f"FVU of k-means, of the SAE, and of local PCA of its rank: {listed(in_words)}",
            bridge_figure,
        ),
    ]


def printed_geometry(out: Path) -> dict[int, dict[str, Any]]:
    """What `sae geometry --json` printed of TopK SAEs into `topK.json`, by K."""
    return {
        int(path.stem.removeprefix("top")): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(out.glob("top*.json"))
    }


def write_claims(
    out: Path, section: str, command: str, claims: Sequence[Claim], also: Sequence[str] = ()
) -> None:
    """Write the claims of a section for `report.py`, and further figures for it to show."""
    document = {
        "section": section,
        "command": command,
        "claims": [asdict(claim) for claim in claims],
        "also": list(also),
    }
    (out / "claims.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

"""Both solvers on a store of a real model, and SAELens' trainer: held-out FVU, L0, and KL with the SAE spliced in.

    PYTHONPATH=. python tests/benchmarks/real.py HOME STORE MODEL [--act topk --act batchtopk --act jumprelu --act relu]
        [--solver sgd --solver pam-sgd] [--l0 32] [--seed 0] [--tokens 3000] [OPTION=VALUE ...]
    PYTHONPATH=. python tests/benchmarks/real.py HOME STORE MODEL --saelens-python PYTHON
        --case batchtopk-32 --rate 1e-3 [--seed 0] [--tokens 3000] [--steps N]

print a line of JSON for each activation and solver, or each case and rate, then a table of both solvers. OPTION is one
of `saecli.fit`, such as normalize=scale. relu has no target: it is trained at each `--weight` of L1, and its measures
are on straight lines between them, in the logarithm of L0, at `--l0`. PYTHON is that of an environment that has
sae-lens 6.54.12; `saelens_training.py` has its cases.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import saecli
from saecli import SAE, ActivationStore
from saecli.sae.activations import ACTIVATIONS, KeepsK
from tests.benchmarks.saelens import trained

ACTS = ("topk", "batchtopk", "jumprelu", "relu")
MEASURED = ("fvu", "l0", "kl", "ce_recovered", "silent_fraction")
Line = dict[str, Any]


def main(
    home: str,
    store: str,
    model: str,
    options: Annotated[list[str] | None, typer.Argument()] = None,
    act: Annotated[list[str], typer.Option()] = [*ACTS],  # noqa: B006 - Typer copies it
    solver: Annotated[list[str], typer.Option()] = ["sgd", "pam-sgd"],  # noqa: B006
    weight: Annotated[list[float], typer.Option()] = [1.7, 2.4],  # noqa: B006
    l0: int = 32,
    seed: int = 0,
    tokens: int = 3000,
    saelens_python: Path | None = None,
    case: Annotated[list[str], typer.Option()] = ["batchtopk-32"],  # noqa: B006
    rate: Annotated[list[str], typer.Option()] = ["1e-3"],  # noqa: B006
    steps: int = 4000,
) -> None:
    rows = saecli.open_store(store, home=home)
    given = dict(parsed(option) for option in options or [])
    if saelens_python is None:
        saes = ours(rows, act, solver, weight, l0, seed, given)
    else:
        saes = by_saelens(saelens_python, rows, case, rate, steps, seed)
    lines = []
    for line, sae in saes:
        measures = saecli.evaluate(sae, rows, model=model, tokens=tokens, home=home)
        rounded = {k: None if measures[k] is None else round(measures[k], 4) for k in MEASURED}
        lines.append(line | rounded)
        print(json.dumps(lines[-1]), flush=True)
    if saelens_python is None and {*solver} == {"sgd", "pam-sgd"}:
        print(table(lines, act, l0))


def parsed(option: str) -> tuple[str, Any]:
    name, _, value = option.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:  # a word
        return name, value


def ours(
    rows: ActivationStore,
    acts: list[str],
    solvers: list[str],
    weights: list[float],
    l0: int,
    seed: int,
    options: dict[str, Any],
) -> Iterator[tuple[Line, SAE]]:
    for act in acts:
        sparsities: list[dict[str, Any]] = [{"target_l0": float(l0)}]
        if issubclass(ACTIVATIONS[act], KeepsK):
            sparsities = [{"k": l0}]
        elif act == "relu":
            sparsities = [{"sparsity_weight": weight} for weight in weights]
        for solver in solvers:
            for sparsity in sparsities:
                began = time.process_time()
                sae = saecli.fit(rows, solver=solver, act=act, seed=seed, **sparsity, **options)
                seconds = time.process_time() - began
                line = {"act": act, "solver": solver, "seed": seed, **sparsity, **options}
                yield line | {"seconds": round(seconds)}, sae


def by_saelens(
    python: Path, rows: ActivationStore, cases: list[str], rates: list[str], steps: int, seed: int
) -> Iterator[tuple[Line, SAE]]:
    for case in cases:
        for rate in rates:
            sae, known = trained(python, rows, case, 4 * rows.d_in, steps, rate, seed)
            yield {"saelens": case, "rate": rate, "steps": steps, "seed": seed} | known, sae


def table(lines: list[Line], acts: Sequence[str], l0: int) -> str:
    """Both solvers' FVU and KL by activation, and by how much those of `pam-sgd` are lower."""
    heads = ["", "FVU, `sgd`", "`pam-sgd`", "lower by", "KL, `sgd`", "`pam-sgd`", "lower by"]
    text = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for act in acts:
        cells = [act]
        for measure in ("fvu", "kl"):
            sgd, pam = (
                at_l0(
                    [one for one in lines if (one["act"], one["solver"]) == (act, name)],
                    measure,
                    l0,
                )
                for name in ("sgd", "pam-sgd")
            )
            cells += [f"{sgd:.4f}", f"{pam:.4f}", f"{1 - pam / sgd:.1%}"]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def at_l0(lines: list[Line], measure: str, l0: float) -> float:
    """A measure: of one SAE as it is, of several between those about an L0; NaN if none are."""
    if len(lines) == 1:
        return float(lines[0][measure])
    by_l0 = sorted(lines, key=lambda line: line["l0"])
    logs = [np.log(line["l0"]) for line in by_l0]
    values = [line[measure] for line in by_l0]
    return float(np.interp(np.log(l0), logs, values, left=np.nan, right=np.nan))


if __name__ == "__main__":
    typer.run(main)

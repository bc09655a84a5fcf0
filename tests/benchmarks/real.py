"""Both solvers on a store of a real model, and SAELens' trainer: held-out FVU, L0, and KL with the SAE spliced in.

    PYTHONPATH=. python tests/benchmarks/real.py HOME STORE MODEL [--act topk --act batchtopk --act jumprelu]
        [--solver sgd --solver pam-sgd] [--l0 32] [--seed 0] [--tokens 3000] [OPTION=VALUE ...]
    PYTHONPATH=. python tests/benchmarks/real.py HOME STORE MODEL --saelens-python PYTHON
        --case batchtopk-32 --rate 1e-3 [--seed 0] [--tokens 3000] [--steps N]

print a line of JSON for each activation and solver, or each case and rate; OPTION is one of `saecli.fit`, such as
normalize=scale. PYTHON is that of an environment that has sae-lens 6.54.12; `saelens_training.py` has its cases.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import saecli
from saecli import SAE, ActivationStore
from tests.benchmarks.saelens import trained

ACTS = ("topk", "batchtopk", "jumprelu")
MEASURED = ("fvu", "l0", "kl", "ce_recovered", "silent_fraction")
Trained = Iterator[tuple[dict[str, Any], SAE]]


def main(
    home: str,
    store: str,
    model: str,
    options: Annotated[list[str] | None, typer.Argument()] = None,
    act: Annotated[list[str], typer.Option()] = [*ACTS],  # noqa: B006 - Typer copies it
    solver: Annotated[list[str], typer.Option()] = ["sgd", "pam-sgd"],  # noqa: B006
    l0: int = 32,
    seed: int = 0,
    tokens: int = 3000,
    saelens_python: Path | None = None,
    case: Annotated[list[str], typer.Option()] = ["batchtopk-32"],  # noqa: B006
    rate: Annotated[list[str], typer.Option()] = ["1e-3"],  # noqa: B006
    steps: int = 4000,
) -> None:
    rows = saecli.open_store(store, home=home)
    given: dict[str, Any] = {}
    for option in options or []:
        name, _, value = option.partition("=")
        try:
            given[name] = json.loads(value)
        except ValueError:  # a word
            given[name] = value
    if saelens_python is None:
        saes = ours(rows, act, solver, l0, seed, given)
    else:
        saes = by_saelens(saelens_python, rows, case, rate, steps, seed)
    for line, sae in saes:
        measures = saecli.evaluate(sae, rows, model=model, tokens=tokens, home=home)
        rounded = {
            key: None if measures[key] is None else round(measures[key], 4) for key in MEASURED
        }
        print(json.dumps(line | rounded), flush=True)


def ours(
    rows: ActivationStore,
    acts: list[str],
    solvers: list[str],
    l0: int,
    seed: int,
    options: dict[str, Any],
) -> Trained:
    for act in acts:
        sparsity = {"k": l0} if "topk" in act else {"target_l0": float(l0)}
        for solver in solvers:
            began = time.process_time()
            sae = saecli.fit(rows, solver=solver, act=act, seed=seed, **sparsity, **options)
            seconds = time.process_time() - began
            line = {"act": act, "asked": l0, "solver": solver, "seed": seed, **options}
            yield line | {"seconds": round(seconds)}, sae


def by_saelens(
    python: Path,
    rows: ActivationStore,
    cases: list[str],
    rates: list[str],
    steps: int,
    seed: int,
) -> Trained:
    for case in cases:
        for rate in rates:
            sae, known = trained(python, rows, case, 4 * rows.d_in, steps, rate, seed)
            yield {"saelens": case, "rate": rate, "steps": steps, "seed": seed} | known, sae


if __name__ == "__main__":
    typer.run(main)

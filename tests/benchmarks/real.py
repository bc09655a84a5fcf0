"""Both solvers on a store of a real model: held-out FVU, L0, and KL with the SAE spliced in.

    python real.py HOME STORE MODEL [--act topk --act batchtopk --act jumprelu] [--solver sgd --solver pam-sgd]
        [--l0 32] [--seed 0] [--tokens 3000] [OPTION=VALUE ...]

prints a line of JSON for each activation and solver; OPTION is one of `saecli.fit`, such as normalize=scale.
"""

import json
import time
from typing import Annotated, Any

import typer

import saecli

ACTS = ("topk", "batchtopk", "jumprelu")
MEASURED = ("fvu", "l0", "kl", "ce_recovered", "silent_fraction")


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
) -> None:
    rows = saecli.open_store(store, home=home)
    given: dict[str, Any] = dict(option.split("=", 1) for option in options or [])
    for kind in act:
        sparsity = {"k": l0} if "topk" in kind else {"target_l0": float(l0)}
        for name in solver:
            began = time.process_time()
            sae = saecli.fit(rows, solver=name, act=kind, seed=seed, **sparsity, **given)
            seconds = time.process_time() - began
            measures = saecli.evaluate(sae, rows, model=model, tokens=tokens, home=home)
            line = {"act": kind, "solver": name, "seed": seed, **given, "seconds": round(seconds)}
            print(json.dumps(line | {key: round(measures[key], 4) for key in MEASURED}), flush=True)


if __name__ == "__main__":
    typer.run(main)

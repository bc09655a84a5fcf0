"""From a model to an understood SAE in Python, with the bundled model and text: about a minute, and no network.

    python examples/whole_chain.py [FOLDER [ROWS]]

In a notebook, the values of `draw` (after `%matplotlib inline`) and the names of the store and the SAE show themselves:
`first_hour.ipynb`.
"""

import argparse
from pathlib import Path

import torch

import saecli


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("whole-chain"))
    parser.add_argument("rows", nargs="?", type=int, default=20_000)
    given = parser.parse_args()
    folder = given.folder

    # Activations of block 2 over the standard library's docstrings, on disk.
    store = saecli.extract(
        "tiny-gemma2",
        layer=2,
        rows=given.rows,
        home=folder / "home",
        name="docs",
        dataset="stdlib-docs",
    )
    print(store)

    # Two SAEs of the same size and sparsity; a tenth of the documents is held out.
    options = {"act": "topk", "k": 16, "d_sae": 512, "epochs": 10}
    saes = {solver: saecli.fit(store, solver=solver, **options) for solver in ("sgd", "pam-sgd")}
    for solver, sae in saes.items():
        measured = saecli.evaluate(sae, store, model="tiny-gemma2", tokens=4096)
        print(
            f"{solver}: FVU {measured['fvu']:.4f}, L0 {measured['l0']:.1f}, CE recovered {measured['ce_recovered']:.3f}"
        )

    # Codes of any activations, and the latents that fire on a token.
    sae = saes["pam-sgd"]
    x = torch.from_numpy(next(store.split("test").sequential(8))).to(sae.W_enc)
    z = sae.encode(x)
    print(sae, "; latents of the first row:", z[0].nonzero().squeeze(1).tolist())

    # The pages to look at latents in a browser, and the pictures.
    saecli.save_sae(sae, folder / "sae", store=store)
    saecli.report(folder / "sae", folder / "pages", store, model="tiny-gemma2")
    for picture in "sparsity", "geometry":
        for number, figure in enumerate(saecli.draw(picture, sae, data=store)):
            figure.savefig(folder / f"{picture}-{number}.png")
    print(f"look at {folder / 'pages' / 'index.html'} and the pictures in {folder}")


if __name__ == "__main__":
    main()

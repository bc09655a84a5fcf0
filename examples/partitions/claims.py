"""What `sae geometry` says of the paper's geometry; run by `run.sh`."""

import json
from pathlib import Path
from typing import Any

from measured import arguments
from verdicts import Claim, write_claims


def measures(out: Path) -> dict[int, dict[str, Any]]:
    """What `sae geometry --json` printed, by K."""
    return {
        int(path.stem.removeprefix("top")): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(out.glob("top*.json"))
    }


def main() -> None:
    given = arguments(__doc__)
    by_k = measures(given.out)
    agreed = {k: found["power_diagram"] for k, found in by_k.items()}
    references = {k: found["references"] for k, found in by_k.items()}
    between = all(
        found["kmeans_fvu"] > found["sae_fvu"] > found["local_pca_fvu"]
        for found in references.values()
    )
    write_claims(
        given.out,
        "Geometry",
        given.command,
        [
            Claim(
                "The cells of a TopK SAE are those of a K-th order power diagram",
                "holds"
                if all(found["agreement"] == 1 for found in agreed.values())
                else "does not hold",
                "fraction of rows in the cell of their K nearest sites: "
                + "; ".join(
                    f"K = {k}: {found['agreement']:g} of {found['rows']:,} rows, {found['ties']} ties"
                    for k, found in agreed.items()
                ),
                "orders.png",
            ),
            Claim(
                "An SAE lies between k-means and local PCA in accuracy",
                "holds" if between else "does not hold",
                "FVU of k-means, of the SAE, and of local PCA of its rank, on digits: "
                + "; ".join(
                    f"K = {k}: {found['kmeans_fvu']:.3f}, {found['sae_fvu']:.3f}, {found['local_pca_fvu']:.3f}"
                    for k, found in references.items()
                )
                + ". The figure: 100 points of the plane, local PCA on the SAE's own cells",
                "bridge.png",
            ),
        ],
    )


if __name__ == "__main__":
    main()

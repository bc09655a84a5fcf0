"""What `sae geometry` says of the paper's geometry; run by `run.sh`."""

from measured import arguments
from verdicts import geometry_claims, printed_geometry, write_claims


def main() -> None:
    given = arguments(__doc__)
    # The figures: 100 points of the plane, local PCA on the SAE's own cells.
    claims = geometry_claims(printed_geometry(given.out), "", "orders.png", "bridge.png")
    write_claims(given.out, "Geometry", given.command, claims)


if __name__ == "__main__":
    main()

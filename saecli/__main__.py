"""The entry point of `sae` and `python -m saecli`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it with status 130, also while libraries are loaded."""
    try:
        from .cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

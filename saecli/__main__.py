"""The entry point of `sae` and `python -m saecli`."""

from .base import interrupts


def main() -> None:
    """Run the command line, handling Ctrl-C from the first moment."""
    interrupts.watch()
    from .cli.main import main as run

    run()


if __name__ == "__main__":
    main()

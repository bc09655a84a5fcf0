"""`sae`, which `python -m saecli` is too."""

from . import interrupts


def main() -> None:
    """Run the command line, from its first moment on so that Ctrl-C ends it in order."""
    interrupts.watch()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()

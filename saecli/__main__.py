"""`python -m saecli` is `sae`."""

from .cli import main

main()

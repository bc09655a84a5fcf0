"""The commands of `sae`, one file each, imported when called (see `saecli/cli/main.py`)."""

"""The commands of `sae`: one file each, loaded when it is called (see `saecli/cli.py`)."""

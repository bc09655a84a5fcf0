"""Data that comes with the package: the bundled language model `tiny-gemma2`."""

"""Batch, Codes, activations/, Dictionary, metrics; formats/; the hub."""

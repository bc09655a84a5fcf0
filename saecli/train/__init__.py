"""Rows to batches, the loop, run folders; sgd, pam-sgd; ridge/: the closed-form decoder. See README.md."""

"""Rows on disk: shards, resume, split, shuffle; imported arrays, synthetic worlds. See README.md."""

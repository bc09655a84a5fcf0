"""Text to tokens to a language model to rows.

options.py      ExtractConfig: options of `sae extract`
readers.py      rows of files, Python's docstrings, hub datasets
texts.py        rows to documents; mixtures of sources; messages through chat templates
windows.py      documents to windows of tokens, windows to blocks
plan.py         which stores, of which models and text; hashes
filling.py      blocks through models into stores
extraction.py   saecli.extract, by one process or ranks; rows for training without a store
"""

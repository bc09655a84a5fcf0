"""Text to tokens to a language model to rows.

options.py      ExtractConfig: the options of `sae extract`
readers.py      rows of texts: kinds of files, Python's docstrings, datasets of the hub
texts.py        documents: rows by their column, and mixtures of sources
chats.py        messages through a chat template
windows.py      documents to windows of tokens, windows to blocks
plan.py         which stores are asked for, of which models and text, and their hashes
filling.py      blocks through the models; filling several stores in one pass
extraction.py   saecli.extract, by one process or by ranks
streaming.py    rows for training without a store
"""

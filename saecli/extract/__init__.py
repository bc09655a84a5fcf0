"""Text to tokens to a language model to rows.

options.py          ExtractConfig: the options of `sae extract`; names of models and sites
readers.py          rows of texts: kinds of files, Python's docstrings, datasets of the hub
texts.py            documents: rows by their column, and mixtures of sources
tokenizer.py        special tokens around a text, messages through a chat template, token ids as text
windows.py          documents to windows of tokens, windows to blocks
model_source.py     where a model is: bundled, a folder, a GGUF file, the hub
model_objects.py    a model and a tokenizer that the user has loaded
language_model.py   a loaded model, without blocks not needed; sae extract --list-modules
hooks.py            modules by name, sites among them, activations there read and replaced
reads.py            how strongly later blocks read each dimension
tokens.py           continuations, tokens that a direction promotes
forward.py          blocks through the model; filling several stores in one pass
requests.py         which stores are asked for, and their hashes
extraction.py       saecli.extract, by one process or by ranks
streaming.py        rows for training without a store
splice.py           where an SAE acts in a model, and the windows to run it over
spliced.py          saecli.spliced: SAEs in the forward passes of a loaded model; their codes, edited
together.py         several SAEs in one forward pass
passes.py           forward passes in parts; CE and KL with an SAE in place of the activations
"""

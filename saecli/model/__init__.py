"""A language model: where it is, its tokenizer, modules and hook points, and forward passes.

names.py            names of bundled models and of dtypes
source.py           where a model is: bundled, a folder, a GGUF file, the hub, loaded by the user
choice.py           which of these a user or a store names
tokenizer.py        special tokens around a text, token ids as text
families.py         names of modules and hook points in families of models, as data
saes.py             opening an SAE on the rows of a model's sites
blocks.py           what a block's modules read of the residual stream and add to it, by autograd's graph
modules.py          modules by name, sites among them, activations there read and replaced
language_model.py   a loaded model, without blocks not needed; sae extract --list-modules
windows.py          windows of tokens in batches through a model
unembedding.py      tokens that a direction promotes
"""

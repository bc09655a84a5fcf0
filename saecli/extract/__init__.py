"""Text to tokens to a language model to rows.

options.py          ExtractConfig: the options of `sae extract`; names of models and sites
texts.py            documents: of files, of datasets of the hub, of a mixture of these
text_files.py       the texts of stdlib-docs, .txt, .jsonl and .parquet files
chats.py            messages through a chat template, and who says each token
special.py          what a tokenizer puts around a text
windows.py          documents to windows of tokens, windows to blocks
model_source.py     where a model is: bundled, a folder, the hub
gguf.py             GGUF files, whose packed weights are made dense
language_model.py   a loaded model, without blocks not needed
sites.py            hook points in a block; hooks that read or replace activations
tokens.py           token ids as text, continuations, tokens that a direction promotes
forward.py          blocks through the model; filling several stores in one pass
requests.py         which stores are asked for, and their hashes
extraction.py       saecli.extract, by one process or by ranks
streaming.py        rows for training without a store
splice.py           where an SAE acts in a model, and the windows to run it over
passes.py           forward passes in two parts: the blocks from a hook point on, and the head
effects.py          CE and KL with an SAE in place of the activations
"""

"""Text to tokens to a language model to rows.

    options.py          ExtractConfig: the options of `sae extract`; names of models
    texts.py            documents: stdlib-docs, .txt, .jsonl, .parquet, datasets of the hub
    windows.py          documents to windows of tokens, windows to blocks
    hook_points.py      layer and site; hooks that read or replace activations
    model_source.py     where a model is: bundled, a folder, the hub
    language_model.py   a loaded model, without the blocks that are not needed
    tokens.py           token ids as text, continuations, tokens that a direction promotes
    forward.py          blocks through the model; filling several stores in one pass
    extraction.py       saecli.extract, by one process or by ranks
    streaming.py        rows for training without a store
"""

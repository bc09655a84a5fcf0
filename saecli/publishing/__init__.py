"""SAEs for others: in another library's format, and on the Hugging Face hub.

`conversion.py` makes an SAE ready for a format, `export.py` writes it to a folder, `push.py` to a repository.
"""

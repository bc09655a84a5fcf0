"""SAEs for others: in another library's format, and on the Hugging Face hub.

`export.py` makes an SAE ready for a format and writes it to a folder, `push.py` to a repository.
"""

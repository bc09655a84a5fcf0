"""Publishing SAEs: `export.py` writes one to a folder in another library's format, `push.py` to the Hugging Face hub.
"""

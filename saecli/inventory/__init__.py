"""The stores and runs of a home: opened, filled, described in words, and listed.

`filling.py` finds stores, looks after damage and says how they come along, `importing.py` fills one from
an array, `listing.py` makes documents and tables of them. What lists needs no torch.
"""

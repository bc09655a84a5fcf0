"""The stores and runs of a home: opened, filled, described in words, and listed.

`opening.py` finds stores and looks after damage, `filling.py` says how stores come along, `importing.py` fills one from
an array, `description.py` and `listing.py` make documents and tables of them. What lists needs no torch.
"""

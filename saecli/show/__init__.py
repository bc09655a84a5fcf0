"""Tables, pictures and HTML pages, made of the documents that measure and geometry return.

tables.py    the helper that makes every table; tables of stores, training, geometry
measures.py  the tables of eval, sparsity, probe, controls, refit and steer
prompts.py   tables, a coloured text and a page of the latents that fire on a text
style.py     the common style of pictures, and saving them
pictures.py  loss curves, firing, patterns, frontier, probes, stability, hook points
geometry.py  pictures of cells on a plane, margins and local complexity
drawing.py   saecli.draw: the commands' pictures as figures for a notebook
serve/       the same pages, behind a small server that answers
report/      pages of latents for a browser; assets/ has their scripts and style
"""

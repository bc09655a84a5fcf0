"""The spline of a trained SAE as documents and arrays; pictures and tables are made in `show`.

geometry.py       saecli.geometry: a pass over rows (cells visited, margins, local complexity, ranks), and its document
options.py        the options of a pass over rows
cells.py          a row's cell, margin and nearby boundaries; power diagrams, and a test of their theorem
references.py     FVU of k-means, the SAE and local PCA on the same rows
"""

"""The spline of a trained SAE as documents and arrays; pictures and tables are made in `show`.

functions.py      saecli.geometry: its arguments, which are the command's options
geometry.py       a pass over rows (cells visited, margins, local complexity, ranks), and its document; the cells that a
                  plane through rows meets
cells.py          a row's cell, margin and nearby boundaries; power diagrams, and a test of their theorem
references.py     FVU of k-means, the SAE and local PCA on the same rows
"""

"""The spline of a trained SAE as documents and arrays; pictures and tables are made in `show`.

geometry.py       saecli.geometry: rows measured, references, the document of `sae geometry`
survey.py         one pass over rows: cells visited, margins, local complexity, ranks, samples
cells.py          a row's cell, margin and nearby boundaries; `cells_of` any SAE
diagram.py        K-th order power diagrams, and the theorem that they are the cells of TopK
references.py     FVU of k-means, the SAE and local PCA on the same rows
plane.py          planes through rows, and the cells in a window of one
"""

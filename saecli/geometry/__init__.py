"""The spline of a trained SAE: cells, power diagrams, margins, k-means and local PCA."""

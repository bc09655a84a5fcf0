"""Worlds: rows made of known features, to see which of them an SAE finds.

`world.py` samples rows and their true codes, `synthetic.py` makes a world of options, `saelens.py` reads one that
SAELens saved, `scores.py` compares an SAE with the truth.
"""

from .saelens import is_saved_world, read_saelens, world_files
from .synthetic import SyntheticConfig
from .world import World

__all__ = ["SyntheticConfig", "World", "is_saved_world", "read_saelens", "world_files"]

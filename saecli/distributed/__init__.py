"""Several processes that run one command together, started by torchrun: torch.distributed, as far as it is needed.

`processes.py` joins them and lets them agree, `axes.py` says what they share and passes tensors along it, `latents.py`
takes tensors apart by latents and puts them together.
"""

from .axes import Axis, alone, everyone, latents_axis, leave, rows_axis, share_latents
from .latents import of_latents, over_latents, own_part, whole_on_main
from .processes import agreed, gathered, is_first_to_say, is_main, join, main_first, own_rank, processes

__all__ = ["Axis", "agreed", "alone", "everyone", "gathered", "is_first_to_say", "is_main", "join", "latents_axis",
           "leave", "main_first", "of_latents", "over_latents", "own_part", "own_rank", "processes", "rows_axis",
           "share_latents", "whole_on_main"]

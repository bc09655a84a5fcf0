"""How much a latent promises to one who looks for meaning, as a figure to sort by.

    interest = contrast (1 + agreement) / 2

where contrast is `1 - mean / largest` of the codes' sizes, and agreement is the fraction of the pairs of strongest
texts that peak at the same token. It is 0 for a latent that fires on more than a fraction `DENSE_FREQUENCY` of the
rows, which rarely has one meaning, and for one that fires on fewer than `FEWEST_ROWS` rows, too few to judge by.
"""

from collections import Counter
from collections.abc import Iterable

from ...sae.metrics import DENSE_FREQUENCY

FEWEST_ROWS = 10


def agreement(peaks: Iterable[str]) -> float:
    """The fraction of pairs of texts that peak at the same token, in [0, 1]; 0 for fewer than two texts.

    Args:
        peaks: each text's token at its peak; case and spaces around it do not count.
    """
    counts = Counter(token.strip().casefold() for token in peaks).values()
    texts = sum(counts)
    return sum(count * (count - 1) for count in counts) / (texts * (texts - 1)) if texts > 1 else 0.0


def interest(frequency: float, rows: int, mean: float, largest: float, alike: float) -> float:
    """A latent's interest, in [0, 1].

    Args:
        frequency: fraction of the rows on which it fires.
        rows: number of rows.
        mean: mean size of its codes that are not zero.
        largest: the largest size.
        alike: see `agreement`.
    """
    if frequency > DENSE_FREQUENCY or round(frequency * rows) < FEWEST_ROWS:
        return 0.0
    return (1 - mean / largest) * (1 + alike) / 2

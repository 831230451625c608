"""Which beam each survivor of a step descends from: a model of how soon beams meet in a common ancestor.

A survivor descends from the beam of its own rank with probability `STAYS`, else from any beam, each as likely (the
Moran model of population genetics). Looking back from the beams of a step, that leaves as many different ancestors as
real searches do (`benchmarks/beam_sharing.py`: SmolLM2-135M-Instruct and stories260K, mean of both at 2 and 4 beams,
the latter alone at 6):

    steps back       1     2     4     8     16    32
    2 beams  real    1.74  1.55  1.30  1.11  1.02  1.00
             model   1.73  1.53  1.31  1.10  1.01  1.00
    4 beams  real    3.21  2.73  2.13  1.59  1.22  1.05
             model   3.25  2.77  2.20  1.60  1.18  1.02
    6 beams  real    4.68  3.95  3.04  2.22  1.59  1.22
             model   4.83  4.09  3.17  2.27  1.53  1.11

Real beams keep a few old lines longer than that: the model is 0 to 9% short at 32 steps.
"""

from __future__ import annotations

import random

STAYS = 0.69


def next_parents(num_beams: int, rng: random.Random) -> list[int]:
    """The parent of each survivor of a step."""
    return [beam if rng.random() < STAYS else rng.randrange(num_beams) for beam in range(num_beams)]


def lineages(generations: list[list[int]], distance: int) -> float:
    """From how many beams those of a step descend, `distance` steps back: the mean over the steps of one search.

    `generations[t]` names the parent of each survivor of step t; there are more than `distance` steps.
    """
    counts = []
    for last in range(distance, len(generations)):
        ancestors = set(range(len(generations[last])))
        for step in range(last, last - distance, -1):
            ancestors = {generations[step][beam] for beam in ancestors}
        counts.append(len(ancestors))
    return sum(counts) / len(counts)

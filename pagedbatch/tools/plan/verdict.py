"""Whether paging pays for a run, in words with their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedbatch.sequence import Request
from pagedbatch.tools.plan.forecast import Forecast
from pagedbatch.tools.plan.length_assumption import known_length
from pagedbatch.wording import percent

NOTHING = "paging buys you nothing here"
#: A smaller saving does not count: it comes from a few prompts that begin alike by chance.
_MIN_SAVING = 0.01
#: Paging pays if this many times as many sequences fit into the same memory.
_MIN_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to hold K and V in the memory of the pool: token slots per sequence, the share of them that holds tokens,
    sequences that ran at once, and how many would fit if nothing else limited them. None if no sequence fits."""

    name: str
    slots_a_sequence: float | None
    used: float | None
    at_once: float
    fit: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reasons` are sentences without their full stops."""

    pays: bool
    headline: str
    reasons: list[str]
    schemes: list[Scheme]


def judge(requests: Sequence[Request], expected: Forecast) -> Verdict:
    """Compares the run's own pool with contiguous regions of the same memory.

    Args:
        requests: those of the simulation.
    """
    schemes = compare_schemes(expected)
    paged, contiguous = schemes[0], {each.name: each for each in schemes[1:]}
    known = all(known_length(request) is not None for request in requests)
    saving = expected.sharing_saving or 0.0
    shares = saving >= _MIN_SAVING
    rival = contiguous["oracle" if known else "max"]
    against = []
    if not shares and expected.peak_running_sequences <= 1:
        against = [f"one sequence runs at a time and shares nothing: {_held(paged, rival)}"]
    elif not shares and known and _are_alike(requests, expected.block_size):
        alike = "all sequences will have the same length, known beforehand, and share nothing"
        against = [f"{alike}: a batch of exact regions wastes nothing", _fit(paged, rival)]
    elif not shares and paged.fit < _MIN_GAIN * rival.fit:
        against = [f"nothing is shared, and {_fit(paged, rival)}"]
    if against:
        return Verdict(False, NOTHING, against, schemes)
    reasons = [f"sharing saves {percent(saving)} of the blocks"] if shares else ["nothing is shared"]
    reasons.append(_fit(paged, rival))
    if rival.at_once >= 0.98 * paged.at_once:
        reasons.append("but this pool is large enough for either: here paging saves memory and not time")
    return Verdict(True, "paging pays here", reasons, schemes)


def compare_schemes(expected: Forecast) -> list[Scheme]:
    """The paged pool first, then the three contiguous ways to use its memory."""
    num_slots = expected.num_blocks * expected.block_size
    slots = expected.slots_per_sequence
    paged = Scheme(
        "paged", slots or None, expected.kv_used, expected.mean_running_sequences, num_slots / slots if slots else 0.0
    )
    return [paged] + [
        Scheme(
            name,
            num_slots / use.room if use.room else None,
            use.used if use.replayed else None,
            use.mean_sequences,
            use.room or 0.0,
        )
        for name, use in expected.contiguous.schemes().items()
    ]


def _are_alike(requests: Sequence[Request], block_size: int) -> bool:
    """Whether all sequences end in the same block of their tables."""
    ends = {-(-request.max_stored_tokens // block_size) for request in requests}
    return len(ends) == 1


def _held(paged: Scheme, rival: Scheme) -> str:
    if rival.slots_a_sequence is None or paged.slots_a_sequence is None:
        return f"a contiguous region ({rival.name}) does not fit"
    return (
        f"it holds {paged.slots_a_sequence:,.0f} token slots on average, and in a contiguous region ({rival.name}) "
        f"{rival.slots_a_sequence:,.0f}"
    )


def _fit(paged: Scheme, rival: Scheme) -> str:
    return f"{paged.fit:,.0f} sequences fit into this pool, and {rival.fit:,.0f} in contiguous regions ({rival.name})"

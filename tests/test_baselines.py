"""Contiguous allocation: the buddy allocator against a map of the memory, the replay against hand-worked examples."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.stats.baselines import (
    SCHEMES,
    BuddyAllocator,
    ContiguousUse,
    SequenceLengths,
    compare,
    next_power_of_two,
    replay,
)


def shares(use: ContiguousUse) -> tuple[float, float, float, float]:
    return (use.used, use.reserved, use.internal, use.external)


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1025, 2048)])
def test_next_power_of_two(n: int, power: int) -> None:
    assert next_power_of_two(n) == power


def test_buddies_split_and_join() -> None:
    memory = BuddyAllocator(16)
    assert [memory.allocate(4), memory.allocate(4), memory.allocate(8)] == [0, 4, 8]
    assert memory.allocate(1) is None
    memory.release(0, 4)
    memory.release(8, 8)
    assert memory.num_free_slots == 12
    assert memory.allocate(16) is None, "4..8 is held"
    memory.release(4, 4)
    assert memory.allocate(16) == 0


def test_the_lowest_chunk_that_fits_is_taken() -> None:
    memory = BuddyAllocator(32)
    starts = [memory.allocate(4) for _ in range(8)]
    for start in starts[::2]:
        assert start is not None
        memory.release(start, 4)
    assert [memory.allocate(4), memory.allocate(2)] == [0, 8]


def test_memory_that_is_no_power_of_two_is_cut_into_arenas() -> None:
    memory = BuddyAllocator(12)
    assert memory.max_chunk == 8
    assert [memory.allocate(8), memory.allocate(4), memory.allocate(1)] == [0, 8, None]
    memory.release(8, 4)
    memory.release(0, 8)
    assert memory.allocate(16) is None, "arenas don't join to more than there is"


@given(st.integers(1, 100), st.lists(st.integers(0, 9), max_size=60))
def test_buddy_allocator_against_a_map_of_the_memory(num_slots: int, actions: list[int]) -> None:
    """Up to 6 asks for a chunk of `1 << action`, above it gives the oldest back."""
    memory = BuddyAllocator(num_slots)
    owner: list[int | None] = [None] * num_slots
    held: list[tuple[int, int]] = []
    for number, action in enumerate(actions):
        if action > 6:
            if held:
                start, chunk = held.pop(0)
                memory.release(start, chunk)
                owner[start : start + chunk] = [None] * chunk
        else:
            chunk = 1 << action
            aligned = [a for a in range(0, num_slots - chunk + 1, chunk) if not any(owner[a : a + chunk])]
            start_or_none = memory.allocate(chunk)
            assert (start_or_none is None) == (aligned == []), "a free aligned run is always found"
            if start_or_none is not None:
                assert start_or_none in aligned
                owner[start_or_none : start_or_none + chunk] = [number + 1] * chunk
                held.append((start_or_none, chunk))
        assert memory.num_free_slots == owner.count(None)


def test_one_sequence_in_each_scheme() -> None:
    """Prompt 3, 5 tokens out of 12 allowed: used 4+5+6+7+8 = 30, yet to come 4+3+2+1+0 = 10, over 5 steps."""
    one = [SequenceLengths(prompt=3, output=5, limit=15)]
    use = compare(one, 32)
    # Reserves 15 of a chunk of 16: 7 never used and 1 lost to the chunk, in 5 steps.
    assert shares(use.max) == pytest.approx((30 / 80, 10 / 80, 35 / 80, 5 / 80))
    # Reserves 3 + 8 = 11 of a chunk of 16.
    assert shares(use.pow2) == pytest.approx((30 / 80, 10 / 80, 15 / 80, 25 / 80))
    # Reserves its 8, a whole chunk. The other 24 slots are free, and nobody waits for them.
    assert shares(use.oracle) == pytest.approx((30 / 40, 10 / 40, 0, 0))
    assert [u.mean_sequences for u in use.schemes().values()] == [1, 1, 1]


def test_pow2_never_reserves_more_than_the_limit() -> None:
    lengths = SequenceLengths(prompt=10, output=33, limit=50)
    assert [reserve(lengths) for reserve in SCHEMES.values()] == [50, 50, 43]


def test_the_third_sequence_starts_when_the_second_ends() -> None:
    """Chunks of 8 in 16 slots: two run; ends at 5 and 4; the third runs from 4 to 6."""
    rows = [SequenceLengths(3, 5, 8), SequenceLengths(4, 4, 8), SequenceLengths(6, 2, 8)]
    use = replay(rows, SCHEMES["oracle"], 16)
    assert use.mean_sequences == pytest.approx((5 + 4 + 2) / 6)
    assert use.external == 0
    used = (4 + 5 + 6 + 7 + 8) + (5 + 6 + 7 + 8) + (7 + 8)
    assert use.used == pytest.approx(used / (8 * 11))


def test_free_memory_is_external_while_the_head_waits_for_more() -> None:
    """8 of 16 slots stand free for the 5 steps in which the second row waits for all 16."""
    use = replay([SequenceLengths(3, 5, 8), SequenceLengths(8, 8, 16)], SCHEMES["oracle"], 16)
    assert use.external == pytest.approx(8 * 5 / (8 * 5 + 16 * 8 + 8 * 5))
    assert use.mean_sequences == pytest.approx((5 + 8) / 13)


def test_scattered_free_memory_does_not_help() -> None:
    """Four chunks of 4 fill 16 slots. At step 1 the first and third end: 8 free, but no 8 in a row before step 3."""
    rows = [SequenceLengths(4 - out, out, 4) for out in (1, 3, 1, 3)]
    use = replay([*rows, SequenceLengths(4, 4, 8)], SCHEMES["oracle"], 16)
    assert use.mean_sequences == pytest.approx((1 + 3 + 1 + 3 + 4) / (3 + 4))
    assert use.external == pytest.approx(8 * 2 / (4 * 8 + 8 * 4 + 8 * 2))


def test_waiting_for_the_sequence_budget_is_not_external() -> None:
    rows = [SequenceLengths(3, 5, 8)] * 3
    use = replay(rows, SCHEMES["oracle"], 64, max_num_seqs=1)
    assert use.external == 0
    assert use.mean_sequences == 1


def test_a_sequence_that_never_fits_is_refused_and_the_others_go_on() -> None:
    rows = [SequenceLengths(20, 5, 30), SequenceLengths(3, 5, 8)]
    use = replay(rows, SCHEMES["oracle"], 16)
    assert (use.replayed, use.refused) == (1, 1)
    assert shares(use) == pytest.approx((30 / 40, 10 / 40, 0, 0))


def test_when_nothing_fits_all_memory_is_lost() -> None:
    use = replay([SequenceLengths(20, 5, 30)], SCHEMES["oracle"], 16)
    assert shares(use) == (0, 0, 0, 1)
    assert (use.mean_sequences, use.replayed, use.refused) == (0, 0, 1)


def test_no_sequences() -> None:
    assert all(shares(use) == (0, 0, 0, 0) and use.replayed == 0 for use in compare([], 16).schemes().values())


def step_by_step(
    rows: list[SequenceLengths], scheme: str, num_slots: int, width: int
) -> tuple[tuple[float, ...], float]:
    """The replay as it is told, a token and a step at a time."""
    memory = BuddyAllocator(num_slots)
    waiting = [row for row in rows if next_power_of_two(SCHEMES[scheme](row)) <= memory.max_chunk]
    running: list[tuple[SequenceLengths, int, int, int]] = []  # with start address, chunk, tokens out
    totals = [0, 0, 0, 0]
    steps = lifetimes = 0
    while waiting or running:
        waits_for_memory = False
        while waiting and len(running) < width:
            chunk = next_power_of_two(SCHEMES[scheme](waiting[0]))
            address = memory.allocate(chunk)
            if address is None:
                waits_for_memory = True
                break
            running.append((waiting.pop(0), address, chunk, 0))
        running = [(row, address, chunk, out + 1) for row, address, chunk, out in running]
        for row, _, chunk, out in running:
            tokens, reservation = row.prompt + out, SCHEMES[scheme](row)
            totals[0] += tokens
            totals[1] += row.final - tokens
            totals[2] += reservation - row.final
            totals[3] += chunk - reservation
        totals[3] += memory.num_free_slots if waits_for_memory else 0
        steps += 1
        lifetimes += len(running)
        for row, address, chunk, out in running:
            if out == row.output:
                memory.release(address, chunk)
        running = [each for each in running if each[3] < each[0].output]
    if not steps:
        return (0.0, 0.0, 0.0, 1.0 if rows else 0.0), 0.0
    return tuple(total / sum(totals) for total in totals), lifetimes / steps


row_lengths = st.builds(
    lambda prompt, output, unused: SequenceLengths(prompt, output, prompt + output + unused),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 20),
)


@given(st.lists(row_lengths, max_size=20), st.sampled_from(list(SCHEMES)), st.integers(1, 150), st.integers(1, 8))
def test_replay_by_events_equals_replay_by_steps(
    rows: list[SequenceLengths], scheme: str, num_slots: int, width: int
) -> None:
    use = replay(rows, SCHEMES[scheme], num_slots, width)
    expected, mean_sequences = step_by_step(rows, scheme, num_slots, width)
    assert shares(use) == pytest.approx(expected)
    assert use.mean_sequences == pytest.approx(mean_sequences)
    assert use.replayed + use.refused == len(rows)


def test_figure_2_of_the_paper() -> None:
    """ShareGPT's mean lengths as log-normals, a limit of 2048 and the paper's memory give the paper's shares back.

    arXiv 2309.06180, figure 2: used, reserved, internal, external. The trace itself is not to be had, hence 7 points.
    """
    draw = random.Random(0)

    def length(log_mean: float, sigma: float) -> int:
        return min(1024, max(1, round(draw.lognormvariate(log_mean, sigma))))

    rows = [
        SequenceLengths(prompt=length(4.58, 1.0), output=length(5.61, 0.65), limit=2048) for _ in range(2000)
    ]  # means 161 and 338
    use = compare(rows, 15_700)
    assert shares(use.max) == pytest.approx((0.204, 0.133, 0.573, 0.089), abs=0.07)
    assert shares(use.pow2) == pytest.approx((0.268, 0.179, 0.136, 0.416), abs=0.07)
    assert shares(use.oracle) == pytest.approx((0.382, 0.252, 0.0, 0.366), abs=0.07)
    assert use.max.used < use.pow2.used < use.oracle.used

"""What contiguous allocation would have held for the same rows: a replay through a buddy allocator.

This is the comparison of figure 2 in the PagedAttention paper (arXiv 2309.06180, sections 2.2, 3 and 6.1), whose three
contiguous systems differ only in how much a sequence reserves when it starts:

- `max`: its length limit, prompt + max_tokens;
- `pow2`: its prompt and its true output length rounded up to a power of two;
- `oracle`: its exact final length.

All three get their region from a buddy allocator, as in the paper. Every slot of memory is then in one of four states:

- used: holds a token;
- reserved: will hold one before the sequence ends;
- internal: reserved, never to hold one;
- external: lost to the allocator, either what a buddy chunk has over the reservation, or what is free although the
  head of the queue waits for memory. Free memory that nobody waits for is not counted.

With log-normal lengths of ShareGPT's means and the paper's memory (15.7 k slots) this gives its figure back within 7
points (tests/test_baselines.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagedbatch.stats.schema import Contiguous, ContiguousUse


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """One sequence as it turned out, in tokens. `limit` is the longest it could have become, prompt included."""

    prompt: int
    output: int
    limit: int

    @property
    def final(self) -> int:
        return self.prompt + self.output


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` (>= 1)."""
    return 1 << (n - 1).bit_length()


#: Slots a sequence reserves at its start, by scheme, in the order of the paper's figure 2.
SCHEMES: dict[str, Callable[[SequenceLengths], int]] = {
    "max": lambda lengths: max(lengths.limit, lengths.final),
    "pow2": lambda lengths: min(lengths.prompt + next_power_of_two(lengths.output), SCHEMES["max"](lengths)),
    "oracle": lambda lengths: lengths.final,
}


class BuddyAllocator:
    """Chunks of a power of two of `num_slots` slots (Knuth, TAOCP 1, 2.5); another size is cut into such arenas."""

    def __init__(self, num_slots: int) -> None:
        self.num_free_slots = num_slots
        #: Free chunks by order: start addresses of chunks of `1 << order` slots.
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    @property
    def max_chunk(self) -> int:
        """The largest chunk that an empty memory can give, in slots."""
        return 1 << len(self._free) >> 1

    def allocate(self, chunk: int) -> int | None:
        """The start of a free run of `chunk` slots (a power of two), or None if there is none now."""
        order = chunk.bit_length() - 1
        split = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if split is None:
            return None
        start = min(self._free[split])
        self._free[split].remove(start)
        for smaller in reversed(range(order, split)):
            self._free[smaller].add(start + (1 << smaller))
        self.num_free_slots -= chunk
        return start

    def release(self, start: int, chunk: int) -> None:
        """Gives a chunk back and joins it with its buddy as far up as both are free."""
        self.num_free_slots += chunk
        order = chunk.bit_length() - 1
        while (start ^ 1 << order) in self._free[order]:
            self._free[order].remove(start ^ 1 << order)
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)


def replay(
    sequences: Iterable[SequenceLengths],
    reserve: Callable[[SequenceLengths], int],
    num_slots: int,
    max_num_seqs: int | None = None,
) -> ContiguousUse:
    """Runs `sequences` first come, first served, in `num_slots` slots, each in a region of its own, one token per step.

    All wait from the start; a sequence begins when the allocator has room for it (and fewer than `max_num_seqs` run),
    holds its prompt and one token in its first step, and gives its region back after its last. Samples and beams are
    sequences like any other. Only starts and ends are visited, so the cost does not depend on the lengths.
    """
    memory = BuddyAllocator(num_slots)
    running: list[tuple[int, int, int]] = []  # heap of (end, start address, chunk)
    now = 0
    used = reserved = internal = external = lifetimes = replayed = refused = 0

    for lengths in sequences:
        reservation = reserve(lengths)
        chunk = next_power_of_two(reservation)
        if chunk > memory.max_chunk:
            refused += 1
            continue
        while True:
            at_width = len(running) == max_num_seqs
            address = None if at_width else memory.allocate(chunk)
            if address is not None:
                break
            end = running[0][0]
            if not at_width:
                external += memory.num_free_slots * (end - now)
            now = end
            while running and running[0][0] == now:
                _, freed, freed_chunk = heapq.heappop(running)
                memory.release(freed, freed_chunk)
        steps = lengths.output
        heapq.heappush(running, (now + steps, address, chunk))
        replayed += 1
        lifetimes += steps
        used += steps * lengths.prompt + steps * (steps + 1) // 2
        reserved += steps * (steps - 1) // 2
        internal += steps * (reservation - lengths.final)
        external += steps * (chunk - reservation)

    if refused and not replayed:
        external = 1  # the whole memory is of no use
    total = used + reserved + internal + external or 1
    makespan = max((end for end, _, _ in running), default=1)
    return ContiguousUse(
        used=used / total,
        reserved=reserved / total,
        internal=internal / total,
        external=external / total,
        mean_sequences=lifetimes / makespan,
        room=num_slots * lifetimes / total,
        replayed=replayed,
        refused=refused,
    )


def compare(sequences: list[SequenceLengths], num_slots: int, max_num_seqs: int | None = None) -> Contiguous:
    """All three schemes on the same sequences and memory."""
    return Contiguous(
        **{name: replay(sequences, reserve, num_slots, max_num_seqs) for name, reserve in SCHEMES.items()}
    )

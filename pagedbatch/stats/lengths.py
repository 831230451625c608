"""How long prompts and outputs were: counts in power-of-two buckets."""

from __future__ import annotations

from pagedbatch.stats.schema import LengthCounts


class LengthHistogram:
    """Count, sum, extremes and a histogram of token counts, in constant memory."""

    def __init__(self) -> None:
        self._count = 0
        self._total = 0
        self._min = 0
        self._max = 0
        self._buckets: dict[int, int] = {}

    def add(self, tokens: int) -> None:
        self._min = tokens if self._count == 0 else min(self._min, tokens)
        self._max = max(self._max, tokens)
        self._count += 1
        self._total += tokens
        bucket = tokens.bit_length()
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def merge(self, other: LengthHistogram) -> None:
        """Adds what another one counted."""
        if not other._count:
            return
        self._min = other._min if self._count == 0 else min(self._min, other._min)
        self._max = max(self._max, other._max)
        self._count += other._count
        self._total += other._total
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def counts(self) -> LengthCounts:
        return LengthCounts(
            count=self._count,
            mean=round(self._total / self._count, 2) if self._count else None,
            min=self._min if self._count else None,
            max=self._max if self._count else None,
            histogram=[
                (1 << bucket >> 1, (1 << bucket) - 1, self._buckets[bucket]) for bucket in sorted(self._buckets)
            ],
        )

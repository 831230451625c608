"""The rows that are replayed for the contiguous baselines: the first of the input, up to a limit."""

from __future__ import annotations

import heapq
from array import array
from itertools import islice

from pagedbatch.outputs import RequestOutput
from pagedbatch.params import GenerationParams
from pagedbatch.stats.baselines import SequenceLengths

MAX_SEQUENCES = 2000


def sequence_lengths(output: RequestOutput, params: GenerationParams, max_model_len: int) -> list[SequenceLengths]:
    """The sequences that a contiguous system would have held for a finished row; none for an error row.

    Samples end where they ended. Beams run side by side until the search ends, so each of the `num_beams` is as long as
    the longest hypothesis that came back.
    """
    if not output.outputs:
        return []
    prompt = output.num_prompt_tokens
    counts = [max(1, len(completion.token_ids)) for completion in output.outputs]
    # A source and an output of it may together be longer than either may be.
    limit = max(min(prompt + params.max_tokens, max_model_len), prompt + max(counts))
    if params.use_beam_search:
        counts = [max(counts)] * params.num_beams
    return [SequenceLengths(prompt, count, limit) for count in counts]


class RowSample:
    """Keeps the first rows in input order, at most `max_sequences` sequences (but at least one row).

    Rows finish in another order, short ones first; keeping whichever ended first would make the sample too short.
    """

    def __init__(self, max_sequences: int = MAX_SEQUENCES) -> None:
        self._max_sequences = max_sequences
        self._num_sequences = 0
        self._rows: list[tuple[int, list[SequenceLengths]]] = []  # heap, the latest row on top

    def add(self, request_id: int, sequences: list[SequenceLengths]) -> None:
        heapq.heappush(self._rows, (-request_id, sequences))
        self._num_sequences += len(sequences)
        while len(self._rows) > 1 and self._num_sequences > self._max_sequences:
            _, dropped = heapq.heappop(self._rows)
            self._num_sequences -= len(dropped)

    def merge(self, other: RowSample) -> None:
        """Adds the rows of another sample of the same input."""
        for negative_id, sequences in other._rows:
            self.add(-negative_id, sequences)

    def __getstate__(self) -> tuple[int, array[int]]:
        """As one array of numbers: workers send theirs now and then, and pickling objects would take milliseconds."""
        numbers = array("q")
        for negative_id, sequences in self._rows:
            numbers.extend((-negative_id, len(sequences)))
            for each in sequences:
                numbers.extend((each.prompt, each.output, each.limit))
        return self._max_sequences, numbers

    def __setstate__(self, state: tuple[int, array[int]]) -> None:
        self._max_sequences, numbers = state
        self._num_sequences, self._rows = 0, []
        remaining = iter(numbers)
        for request_id, count in zip(remaining, remaining, strict=False):
            lengths = list(islice(remaining, 3 * count))
            self.add(request_id, [SequenceLengths(*lengths[i : i + 3]) for i in range(0, 3 * count, 3)])

    def sequences(self) -> list[SequenceLengths]:
        """In order of arrival."""
        return [lengths for _, row in sorted(self._rows, key=lambda row: -row[0]) for lengths in row]

"""The account of one run: folds step snapshots and finished rows into the figures of OUT.stats.json.

Knows no engine, no torch and no file. A step costs a few additions, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pagedbatch.outputs import BlockMap, EngineCounters, PoolCounts, RequestOutput, StepSnapshot, add_counters
from pagedbatch.params import GenerationParams
from pagedbatch.stats.baselines import compare
from pagedbatch.stats.lengths import Lengths
from pagedbatch.stats.sample import RowSample, sequence_lengths
from pagedbatch.stats.timeline import Timeline, side_by_side


class MemoryAccount:
    """What the run's KV pool held, step by step.

    `block_bytes` is the size of one block over all layers, K and V. `max_num_seqs` caps the contiguous baselines as it
    caps the run. Averages count every step once: sharing saving is the mean of 1 - live / logical blocks, KV used the
    mean of filled slots / slots of live blocks, each over the steps that had a live block (PagedAttention, arXiv
    2309.06180, sections 2.2 and 6.3).
    """

    def __init__(self, *, num_blocks: int, block_size: int, block_bytes: int, max_num_seqs: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.max_num_seqs = max_num_seqs
        self._counters = EngineCounters()
        self._final_live: int | None = None

        self._steps = 0
        self._steps_with_live = 0
        self._live = self._logical = self._running = 0.0
        self._saving = self._kv_used = 0.0
        self._peak_live = self._peak_shared = self._peak_running = self._peak_swapped = 0
        self._model = self._attention = self._sampling = self._host = self._io = self._swap = 0.0
        self._peak_map: BlockMap | None = None

        self._timeline = Timeline()
        self._sample = RowSample()
        self._prompt_lengths = Lengths()
        self._output_lengths = Lengths()

    def observe(self, snapshot: StepSnapshot) -> None:
        """Takes in a step, right after it ran."""
        pool = snapshot.pool
        live = pool.private + pool.shared
        self._steps += 1
        self._live += live
        self._logical += pool.logical
        self._running += snapshot.running_sequences
        if live:
            self._steps_with_live += 1
            self._saving += 1 - live / pool.logical
            self._kv_used += pool.filled_slots / (live * self.block_size)
            self._peak_live = max(self._peak_live, live)
            self._peak_shared = max(self._peak_shared, pool.shared)
        self._peak_running = max(self._peak_running, snapshot.running_sequences)
        self._peak_swapped = max(self._peak_swapped, pool.swapped)
        seconds = snapshot.seconds
        self._model += seconds.model
        self._attention += seconds.attention
        self._sampling += seconds.sampling
        self._swap += seconds.swap
        if snapshot.block_map is not None:
            self._peak_map = snapshot.block_map
        self._host += snapshot.host_seconds
        self._counters = snapshot.counters
        self._timeline.add(snapshot)

    def row_finished(self, output: RequestOutput, params: GenerationParams, max_model_len: int) -> None:
        """Takes in a row that this run finished. Error rows have no sequences and leave no trace."""
        sequences = sequence_lengths(output, params, max_model_len)
        if not sequences:
            return
        self._sample.add(output.request_id, sequences)
        self._prompt_lengths.add(output.num_prompt_tokens)
        for completion in output.outputs:
            self._output_lengths.add(len(completion.token_ids))

    def add_io(self, seconds: float) -> None:
        """Adds time spent reading rows and writing records."""
        self._io += seconds

    def close(self, pool: PoolCounts) -> None:
        """Takes in the pool after the last row: a block still live then was leaked."""
        self._final_live = pool.live

    def follow(self, later: MemoryAccount) -> None:
        """Takes in the account of the pool that came in this one's place, which starts from nothing."""
        self._add_sums(later)
        self._live += later._live
        self._logical += later._logical
        self._running += later._running
        self._peak_live = max(self._peak_live, later._peak_live)
        self._peak_shared = max(self._peak_shared, later._peak_shared)
        self._peak_running = max(self._peak_running, later._peak_running)
        self._peak_swapped = max(self._peak_swapped, later._peak_swapped)
        self._final_live = later._final_live
        self._timeline.follow(later._timeline)

    def stand_beside(self, others: Sequence[MemoryAccount]) -> None:
        """Takes in the accounts of pools that ran at the same time, as if all were one pool.

        Means of blocks and sequences add up. So do peaks, which need not have come at one moment: theirs is the most
        that it can have been. The shares, KV used and sharing saving, are means over the steps of all.
        """
        everyone = [self, *others]
        steps = sum(each._steps for each in everyone)
        means = {
            name: sum(getattr(each, name) / each._steps for each in everyone if each._steps)
            for name in ("_live", "_logical", "_running")
        }
        self._timeline = side_by_side([each._timeline for each in everyone])
        for other in others:
            self._add_sums(other)
            self.num_blocks += other.num_blocks
            if self.max_num_seqs is not None and other.max_num_seqs is not None:
                self.max_num_seqs += other.max_num_seqs
            self._peak_live += other._peak_live
            self._peak_shared += other._peak_shared
            self._peak_running += other._peak_running
            self._peak_swapped += other._peak_swapped
            self._final_live = (self._final_live or 0) + (other._final_live or 0)
        for name, mean in means.items():
            setattr(self, name, mean * steps)

    def _add_sums(self, other: MemoryAccount) -> None:
        """What adds up whenever the other pool ran."""
        self._steps += other._steps
        self._steps_with_live += other._steps_with_live
        self._saving += other._saving
        self._kv_used += other._kv_used
        self._model += other._model
        self._attention += other._attention
        self._sampling += other._sampling
        self._host += other._host
        self._io += other._io
        self._swap += other._swap
        if other._peak_map is not None and (
            self._peak_map is None or other._peak_map.live_blocks > self._peak_map.live_blocks
        ):
            self._peak_map = other._peak_map
        self._counters = add_counters([self._counters, other._counters])
        self._sample.merge(other._sample)
        self._prompt_lengths.merge(other._prompt_lengths)
        self._output_lengths.merge(other._output_lengths)

    def memory(self) -> dict[str, Any]:
        """The `memory` section of the stats: blocks, tokens, bytes, and shares between 0 and 1.

        `kv_used` and `sharing_saving` are None when no step held a block. `swap_seconds` are a part of the model's
        time. `swapped_blocks` were moved, in or out; `peak_swapped_blocks` stood in host memory at once, beside the
        pool. `failed_steps` were taken back and tried again in parts. `peak_map` says who held which blocks when the
        pool was fullest: each sequence's table as [first number, length] runs, equal numbers being one block; None when
        no step held one.
        """
        num_slots = self.num_blocks * self.block_size
        contiguous = compare(self._sample.sequences(), num_slots, self.max_num_seqs)
        return self.blocks() | {
            "contiguous": {
                name: {key: round(value, 6) for key, value in asdict(use).items()} for name, use in contiguous.items()
            },
            "peak_map": None if self._peak_map is None else _map_as_dict(self._peak_map),
        }

    def blocks(self) -> dict[str, Any]:
        """`memory` without the contiguous baselines and the map."""
        counters = self._counters
        swapped_blocks = counters.swapped_out_blocks + counters.swapped_in_blocks
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "peak_live_blocks": self._peak_live,
            "mean_live_blocks": _mean(self._live, self._steps),
            "mean_logical_blocks": _mean(self._logical, self._steps),
            "final_live_blocks": self._final_live,
            "peak_shared_blocks": self._peak_shared,
            "sharing_saving": _mean(self._saving, self._steps_with_live, empty=None),
            "kv_used": _mean(self._kv_used, self._steps_with_live, empty=None),
            "mean_running_sequences": _mean(self._running, self._steps),
            "peak_running_sequences": self._peak_running,
            "cow_copies": counters.cow_copies,
            "preemptions": {"swap": counters.preemptions_swap, "recompute": counters.preemptions_recompute},
            "swapped_blocks": swapped_blocks,
            "peak_swapped_blocks": self._peak_swapped,
            "swapped_out_blocks": counters.swapped_out_blocks,
            "swapped_in_blocks": counters.swapped_in_blocks,
            "swapped_bytes": swapped_blocks * self.block_bytes,
            "swap_seconds": round(self._swap, 4),
            "recomputed_tokens": counters.recomputed_tokens,
            "failed_steps": counters.failed_steps,
            "prefix_cache": {
                "queried_tokens": counters.prefix_queried_tokens,
                "hit_tokens": counters.prefix_hit_tokens,
            },
        }

    def time(self) -> dict[str, float]:
        """Seconds by what they were spent on. `model` excludes `attention`; `host` is scheduling and bookkeeping."""
        return {
            "model": round(self._model, 4),
            "attention": round(self._attention, 4),
            "sampling": round(self._sampling, 4),
            "host": round(self._host, 4),
            "io": round(self._io, 4),
        }

    def timeline(self) -> list[dict[str, Any]]:
        """The run over time; see `Timeline.points`."""
        return self._timeline.points()

    def lengths(self) -> dict[str, Any]:
        """Token counts of the prompts and of the outputs that this run finished; see `Lengths.as_dict`."""
        return {"prompt": self._prompt_lengths.as_dict(), "output": self._output_lengths.as_dict()}


def _mean(total: float, count: int, empty: float | None = 0.0) -> float | None:
    return round(total / count, 6) if count else empty


def _map_as_dict(block_map: BlockMap) -> dict[str, Any]:
    return {
        "live_blocks": block_map.live_blocks,
        "num_sequences": block_map.num_sequences,
        "held": [
            {"row": each.request_id, "num_blocks": each.num_blocks, "runs": [list(run) for run in each.runs]}
            for each in block_map.held
        ],
    }

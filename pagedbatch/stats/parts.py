"""The stats of several shards as those of the whole run. Knows the keys of OUT.stats.json; knows no file.

Each shard had a pool of its own, at the same time as the others or not: their clocks are not compared. So sums are
sums, and whatever a pool holds is told of one pool: peaks are those of the highest, means and shares weigh each shard
by its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedbatch.stats.baselines import SCHEMES

Stats = Mapping[str, Any]

_SUMS = (
    "cow_copies", "swapped_blocks", "swapped_out_blocks", "swapped_in_blocks", "swapped_bytes", "recomputed_tokens",
)  # fmt: skip
_MEANS = ("mean_live_blocks", "mean_logical_blocks", "sharing_saving", "kv_used", "mean_running_sequences")
_HIGHEST = (
    "num_blocks", "peak_live_blocks", "peak_shared_blocks", "peak_running_sequences", "peak_swapped_blocks",
)  # fmt: skip
_SCHEME_SUMS = ("replayed", "refused")


def merged_stats(shards: Mapping[str, Stats], output: str) -> dict[str, Any]:
    """The whole account of the run that the shards make up; `shards` has the stats of each by its file.

    `throughput`: `seconds` and `startup_seconds` are sums, so that tokens a second are those of one shard at a time;
    `longest_shard_seconds` is what the run takes where all shards run at once. Of resumed shards, tokens and times are
    those of the last part of their run alone, as in their own stats. `memory` is None where blocks differ in size.
    `shards` holds the stats as they were.
    """
    parts = list(shards.values())
    output_tokens, seconds = _sum(parts, "throughput", "output_tokens"), _sum(parts, "throughput", "seconds")
    return {
        "settings": _common_settings(parts) | {"output": {"value": output, "source": "command line"}},
        "versions": _joined_versions(parts),
        "rows": {name: _sum(parts, "rows", name) for name in ("total", "ok", "error", "resumed")},
        "throughput": {
            "startup_seconds": round(_sum(parts, "throughput", "startup_seconds"), 4),
            "seconds": round(seconds, 4),
            "longest_shard_seconds": max(
                part["throughput"]["startup_seconds"] + part["throughput"]["seconds"] for part in parts
            ),
            "prompt_tokens": _sum(parts, "throughput", "prompt_tokens"),
            "output_tokens": output_tokens,
            "output_tokens_per_second": round(output_tokens / seconds, 3) if seconds else 0.0,
        },
        "memory": _memory(parts),
        "time": {name: round(_sum(parts, "time", name), 4) for name in parts[0]["time"]},
        "timeline": [],
        "shards": [{"file": name, "stats": stats} for name, stats in shards.items()],
    }


def _sum(parts: Sequence[Stats], section: str, name: str) -> Any:
    return sum(part[section][name] for part in parts)


def _common_settings(parts: Sequence[Stats]) -> dict[str, Any]:
    """Those that all shards had alike; the others stand in each shard's own stats."""
    first = parts[0]["settings"]
    return {name: entry for name, entry in first.items() if all(part["settings"].get(name) == entry for part in parts)}


def _joined_versions(parts: Sequence[Stats]) -> dict[str, str]:
    found: dict[str, dict[str, None]] = {}
    for part in parts:
        for name, version in part["versions"].items():
            found.setdefault(name, {})[version] = None
    return {name: " and ".join(versions) for name, versions in found.items()}


def _memory(parts: Sequence[Stats]) -> dict[str, Any] | None:
    memories = [part["memory"] for part in parts]
    first = memories[0]
    if any(memory[name] != first[name] for memory in memories for name in ("block_size", "block_bytes")):
        return None
    steps = [sum(point["steps"] for point in part["timeline"]) for part in parts]
    return {
        "block_size": first["block_size"],
        "block_bytes": first["block_bytes"],
        **{name: max(memory[name] for memory in memories) for name in _HIGHEST},
        **{name: _mean([memory[name] for memory in memories], steps) for name in _MEANS},
        **{name: sum(memory[name] for memory in memories) for name in _SUMS},
        "failed_steps": sum(memory.get("failed_steps", 0) for memory in memories),  # older accounts have none
        "final_live_blocks": sum(memory["final_live_blocks"] or 0 for memory in memories),
        **{name: _added([memory[name] for memory in memories]) for name in ("preemptions", "prefix_cache")},
        "contiguous": {name: _scheme([memory["contiguous"][name] for memory in memories], steps) for name in SCHEMES},
    }


def _mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Of the values that there are. None where there are none."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    if not total:
        return known[0][0] if known else None
    return round(sum(value * weight for value, weight in known) / total, 6)


def _added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def _scheme(uses: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> dict[str, Any]:
    """Shares of shards that had no sequence to replay don't count."""
    weights = [weight if use["replayed"] else 0 for use, weight in zip(uses, steps, strict=True)]
    return {
        name: sum(use[name] for use in uses) if name in _SCHEME_SUMS else _mean([use[name] for use in uses], weights)
        for name in uses[0]
    }

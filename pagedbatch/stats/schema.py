"""What OUT.stats.json holds, as far as it is read again: keys and types. Tells what doesn't fit; knows no file.

A shape is an `_Object` of named shapes, an `_Each` of many alike, a tuple of one after another, a `_Number`, or a type.
Keys that no reader needs are in nobody's way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedbatch.stats.baselines import SCHEMES

#: Far above what any run counts, and low enough to be multiplied.
_LARGEST = 10**15
#: Blocks of one sequence that a map shows.
_MAX_RUN = 512


@dataclass(frozen=True, slots=True)
class _Number:
    least: float = 0
    most: float = _LARGEST
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class _Optional:
    """The shape, or null."""

    shape: Any


@dataclass(frozen=True, slots=True)
class _Each:
    """A list, or an object under any keys, all of whose values have the shape."""

    container: Any
    shape: Any


@dataclass(frozen=True, slots=True)
class _Object:
    """An object that has the `needed` keys and may have `others`."""

    needed: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)


_COUNT = _Number(is_whole=True)
_NUMBER = _Number()
_SHARE = _Number(most=1)
_TIMES = _Each(dict, _NUMBER)
_COUNTS = _Each(dict, _COUNT)
_SCHEME_SHARES = dict.fromkeys(("used", "reserved", "internal", "external"), _SHARE)

_MEMORY_OF_WORKER = {
    "num_blocks": _COUNT,
    "mean_live_blocks": _NUMBER,
    "sharing_saving": _Optional(_SHARE),
    "kv_used": _Optional(_SHARE),
}
_MEMORY = _MEMORY_OF_WORKER | {
    "block_size": _Number(least=1, is_whole=True),
    "block_bytes": _COUNT,
    "peak_live_blocks": _COUNT,
    "mean_logical_blocks": _NUMBER,
    "mean_running_sequences": _NUMBER,
    "cow_copies": _COUNT,
    "preemptions": _Object({"swap": _COUNT, "recompute": _COUNT}),
    "swapped_blocks": _COUNT,
    "recomputed_tokens": _COUNT,
    "prefix_cache": _Object({"queried_tokens": _COUNT, "hit_tokens": _COUNT}),
    "contiguous": _Object(
        dict.fromkeys(
            SCHEMES,
            _Object(
                _SCHEME_SHARES | {"mean_sequences": _NUMBER, "replayed": _COUNT, "refused": _COUNT}, {"room": _NUMBER}
            ),
        )
    ),
}
_RUN_OF_BLOCKS = (_Number(least=-1, is_whole=True), _Number(1, _MAX_RUN, is_whole=True))
_PEAK_MAP = _Object(
    {
        "num_sequences": _COUNT,
        "held": _Each(list, _Object({"row": _COUNT, "num_blocks": _COUNT, "runs": _Each(list, _RUN_OF_BLOCKS)})),
    }
)
_MEMORY_OTHERS = {
    "swap_seconds": _NUMBER,
    "swapped_bytes": _COUNT,
    "peak_swapped_blocks": _COUNT,
    "failed_steps": _COUNT,
    "peak_map": _Optional(_PEAK_MAP),
}
_POINT = _Object(
    dict.fromkeys(("seconds", "private", "shared", "cached", "free", "logical", "filled_slots"), _NUMBER)
    | dict.fromkeys(("running", "waiting"), _NUMBER)
    | {"steps": _COUNT, "output_tokens": _COUNT}
)
_LENGTHS = _Object(
    dict.fromkeys(("min", "max", "mean"), _Optional(_NUMBER))
    | {"count": _COUNT, "histogram": _Each(list, (_COUNT,) * 3)}
)
_THROUGHPUT = dict.fromkeys(("startup_seconds", "seconds", "output_tokens_per_second"), _NUMBER)
_WORKER = _Object(
    {
        "node": str,
        "rows": _COUNT,
        "restarts": _COUNT,
        "rows_again": _COUNT,
        "memory": _Object(_MEMORY_OF_WORKER),
        "time": _TIMES,
    }
)
_SECTIONS = {
    "settings": _Each(dict, _Object({"value": object, "source": str})),
    "versions": _Each(dict, str),
    "rows": _Object(dict.fromkeys(("total", "ok", "error", "resumed"), _COUNT)),
    "throughput": _Object(_THROUGHPUT | {"output_tokens": _COUNT}, {"steps": _COUNT, "prompt_tokens": _COUNT}),
    "memory": _Optional(_Object(_MEMORY, _MEMORY_OTHERS)),
    "time": _TIMES,
    "timeline": _Each(list, _POINT),
}
_OTHER_SECTIONS = {"lengths": _Each(dict, _LENGTHS), "workers": _Each(list, _WORKER)}
_STATS = _Object(_SECTIONS, _OTHER_SECTIONS)

#: What merging needs of a shard's stats besides.
_MERGED_COUNTS = (
    "peak_shared_blocks", "peak_running_sequences", "peak_swapped_blocks", "swapped_out_blocks", "swapped_in_blocks",
    "swapped_bytes",
)  # fmt: skip
_SHARD = _Object(
    {
        "shard": str,
        "first_row": _COUNT,
        "num_rows": _COUNT,
        "of_rows": _COUNT,
        "input": _Object({"name": str, "size": _COUNT, "hash": str}),
        "model": _Object({"name": str, "fingerprint": str}),
        "settings": dict,
    }
)
_PART = _Object(
    {
        "rows": _SECTIONS["rows"],
        "throughput": _Object(_THROUGHPUT | {"output_tokens": _COUNT, "prompt_tokens": _COUNT}),
        "shard": _SHARD,
        "memory": _Object(
            _MEMORY | dict.fromkeys(_MERGED_COUNTS, _COUNT) | {"final_live_blocks": _Optional(_COUNT)}, _MEMORY_OTHERS
        ),
    }
    | {name: shape for name, shape in _SECTIONS.items() if name not in ("rows", "throughput", "memory")},
    _OTHER_SECTIONS,
)


def stats_problem(stats: Any) -> str | None:
    """Why a JSON value is not the stats of a run: the first key that is missing or of a wrong type. None if it is."""
    found = _problem(stats, _STATS, "") or _contradiction(stats)
    if found is None and (stats["memory"] is None or "shards" in stats):
        return _shards_problem(stats)
    return found


def part_problem(stats: Any) -> str | None:
    """Why a JSON value is not the stats of a shard; None if it is."""
    return _problem(stats, _PART, "") or _contradiction(stats)


def _contradiction(stats: Mapping[str, Any]) -> str | None:
    """Figures of the right types that can't stand beside each other."""
    if stats.get("simulated") and "steps" not in stats["throughput"]:
        return "throughput.steps is missing"
    for name, counts in stats.get("lengths", {}).items():
        if bool(counts["count"]) != bool(counts["histogram"]):
            return f"lengths.{name}.histogram does not fit its count"
        if counts["count"] and None in (counts["min"], counts["max"], counts["mean"]):
            return f"lengths.{name} has a count and no range"
    for number, point in enumerate(stats["timeline"]):
        if point["logical"] < point["private"] + point["shared"]:
            return f"timeline.{number}.logical is less than its blocks"
    memory = stats["memory"]
    if memory is None:
        return None
    if memory["kv_used"] is not None and not (memory["num_blocks"] and memory["mean_live_blocks"]):
        return "memory.kv_used is a share of no blocks"
    if "swap_seconds" in memory and "swapped_bytes" not in memory:
        return "memory.swapped_bytes is missing"
    return None


def _shards_problem(stats: Mapping[str, Any]) -> str | None:
    """Of merged stats: where their shards' pools differ in size, each has memory of its own and all have none."""
    shards = stats.get("shards")
    if not isinstance(shards, list) or (not shards and stats["memory"] is None):
        return "shards is missing" if shards is None else "shards is no list of them"
    for number, shard in enumerate(shards):
        found = _problem(shard, _Object({"file": str, "stats": _STATS}), f"shards[{number}]")
        if found is None and shard["stats"]["memory"] is None:
            found = f"shards[{number}].stats.memory is missing"
        found = found or _contradiction(shard["stats"])
        if found is not None:
            return found
    return None


def _problem(value: Any, shape: Any, place: str) -> str | None:
    if isinstance(shape, _Optional):
        return None if value is None else _problem(value, shape.shape, place)
    if isinstance(shape, _Object):
        return _object_problem(value, shape, place)
    if isinstance(shape, _Each):
        if not isinstance(value, shape.container):
            return f"{place} is no {'list' if shape.container is list else 'object'}"
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        return _first(_problem(item, shape.shape, f"{place}.{name}") for name, item in items)
    if isinstance(shape, tuple):
        if not isinstance(value, list) or len(value) != len(shape):
            return f"{place} is no list of {len(shape)}"
        pairs = enumerate(zip(value, shape, strict=True))
        return _first(_problem(item, inner, f"{place}.{number}") for number, (item, inner) in pairs)
    if isinstance(shape, _Number):
        return (
            None if _is_number(value, shape) else f"{place} is no {'count' if shape.is_whole else 'number'} that fits"
        )
    return None if isinstance(value, shape) else f"{place} is of a wrong type"


def _object_problem(value: Any, shape: _Object, place: str) -> str | None:
    dot = f"{place}." if place else ""
    if not isinstance(value, dict):
        return f"{dot}{next(iter(shape.needed))} is missing"
    needed = (
        _problem(value[name], inner, f"{dot}{name}") if name in value else f"{dot}{name} is missing"
        for name, inner in shape.needed.items()
    )
    others = (_problem(value[name], inner, f"{dot}{name}") for name, inner in shape.others.items() if name in value)
    return _first(needed) or _first(others)


def _first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _is_number(value: Any, shape: _Number) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if shape.is_whole else (int, float)):
        return False
    return bool(shape.least <= value <= shape.most)

"""Rows of Parquet files and Hugging Face datasets. Knows nothing about prompts; imports pyarrow and datasets late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.job.keep import strict_json
from pagedbatch.job.messages import first_line
from pagedbatch.job.rows import RawRow

_BATCH_ROWS = 1024


def open_parquet(path: Path) -> Any:
    """A `pyarrow.parquet.ParquetFile`.

    Raises:
        UsageError: the file is damaged.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} is not a readable Parquet file: {first_line(error)}") from None


def read_parquet(path: Path, first: int = 0) -> Iterator[RawRow]:
    """The rows of a Parquet file from row `first` on, a batch in memory at a time.

    Raises:
        UsageError: the file is damaged.
    """
    import pyarrow

    with open_parquet(path) as file:
        try:
            yield from read_batches(file.iter_batches(batch_size=_BATCH_ROWS), first)
        except (pyarrow.ArrowException, OSError) as error:
            raise UsageError(f"{path} is a damaged Parquet file: {first_line(error)}") from None


def read_dataset(dataset: Any, first: int = 0) -> Iterator[RawRow]:
    """The rows of a `datasets.Dataset` from `first` on: as stored, so that images and audio are not decoded."""
    yield from read_batches(dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS), first)


def read_batches(batches: Iterable[Any], first: int = 0) -> Iterator[RawRow]:
    """The rows of Arrow tables; those before `first` never become Python objects."""
    for batch in batches:
        for fields in batch.slice(first).to_pylist() if first < batch.num_rows else ():
            yield RawRow(fields)
        first = max(0, first - batch.num_rows)


def open_saved_dataset(folder: Path, split: str | None) -> Any:
    """A dataset that `save_to_disk` wrote.

    Raises:
        UsageError: damaged, or a split is missing or must be chosen.
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets and pyarrow raise many kinds for a damaged folder
        raise UsageError(f"{folder} is not a readable saved dataset: {first_line(error)}") from None
    if isinstance(loaded, datasets.DatasetDict):
        chosen = choose_split(str(folder), sorted(loaded), split)
        return _sliced(str(folder), loaded[chosen.partition("[")[0]], chosen)
    if split is None:
        return loaded
    if split.partition("[")[0] != str(loaded.split):
        raise UsageError(f"{folder} holds one dataset without splits: leave --split out")
    return _sliced(str(folder), loaded, split)


def _sliced(name: str, dataset: Any, split: str) -> Any:
    """The part of a split that `train[:100]`, `train[10%:20%]` and sums of these ask for, in `datasets`' own words."""
    import datasets

    if "[" not in split:
        return dataset
    split_name = split.partition("[")[0]
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({split_name: dataset.num_rows})
    except (ValueError, AssertionError, KeyError) as error:
        raise UsageError(f"{name}: --split {split} can't be read: {first_line(error)}") from None
    ranges = [range(part.from_ or 0, dataset.num_rows if part.to is None else part.to) for part in parts]
    return dataset.select(ranges[0] if len(ranges) == 1 else [row for rows in ranges for row in rows])


def load_dataset(name: str, *, split: str | None, subset: str | None) -> Any:
    """A dataset of the Hub, or of a local folder of data files, by `datasets.load_dataset`.

    Raises:
        UsageError: no such dataset, subset or split; the message lists what there is.
    """
    import datasets

    chosen = _known_split(name, split, subset)
    try:
        return datasets.load_dataset(name, subset, split=chosen)
    except Exception as error:
        raise UsageError(f"{name}, split {chosen}, can't be read as a dataset: {first_line(error)}") from None


def stream_dataset(name: str, *, split: str | None, subset: str | None, limit: int | None) -> Iterator[bytes]:
    """The first `limit` rows of a dataset as JSON lines, read without downloading or converting the whole.

    Raises:
        UsageError: as `load_dataset`, or a row can't be written as JSON.
    """
    import datasets

    if split is not None and "[" in split:
        raise UsageError(f"--split {split}: a slice needs the whole dataset; use --limit, or leave --streaming out")
    chosen = _known_split(name, split, subset)
    try:
        dataset = datasets.load_dataset(name, subset, split=chosen, streaming=True)
        for fields in islice(dataset, limit):
            yield strict_json(fields) + b"\n"
    except Exception as error:
        raise UsageError(f"{name}, split {chosen}, can't be streamed: {first_line(error)}") from None


def _known_split(name: str, split: str | None, subset: str | None) -> str:
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, subset)
    except datasets.exceptions.DatasetNotFoundError:
        raise UsageError(f"{name}: no such file, folder or Hub dataset that can be reached from here") from None
    except Exception as error:  # connection, configuration and file errors of many kinds
        raise UsageError(f"{name} can't be opened as a dataset: {first_line(error)}") from None
    splits = list(builder.info.splits or builder.config.data_files or ())
    return choose_split(name, [str(known) for known in splits], split)


def choose_split(name: str, known: list[str], split: str | None) -> str:
    """The split to read: the one asked for, or the only one. `train[:100]` takes a part, as in `datasets`."""
    listed = ", ".join(known)
    if split is None:
        if len(known) != 1:
            raise UsageError(f"{name} has the splits {listed}: choose one with --split")
        return known[0]
    if split.partition("[")[0] not in known:
        raise UsageError(f"{name} has no split {split!r}; its splits are {listed}")
    return split

"""Rows of Parquet files and Hugging Face datasets. Knows nothing about prompts; imports pyarrow and datasets late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
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


def read_parquet(path: Path) -> Iterator[RawRow]:
    """The rows of a Parquet file, a batch in memory at a time.

    Raises:
        UsageError: the file is damaged.
    """
    import pyarrow

    with open_parquet(path) as file:
        try:
            yield from read_batches(file.iter_batches(batch_size=_BATCH_ROWS))
        except (pyarrow.ArrowException, OSError) as error:
            raise UsageError(f"{path} is a damaged Parquet file: {first_line(error)}") from None


def read_dataset(dataset: Any) -> Iterator[RawRow]:
    """The rows of a `datasets.Dataset`: as stored, so that images and audio are not decoded."""
    yield from read_batches(dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS))


def read_batches(batches: Iterable[Any]) -> Iterator[RawRow]:
    for batch in batches:
        for fields in batch.to_pylist():
            yield RawRow(fields)


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
        return loaded[choose_split(str(folder), sorted(loaded), split)]
    if split is not None and split != str(loaded.split):
        raise UsageError(f"{folder} holds one dataset without splits: leave --split out")
    return loaded


def load_dataset(name: str, *, split: str | None, subset: str | None) -> Any:
    """A dataset of the Hub, or of a local folder of data files, by `datasets.load_dataset`.

    Raises:
        UsageError: no such dataset, subset or split; the message lists what there is.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, subset)
    except datasets.exceptions.DatasetNotFoundError:
        raise UsageError(f"{name}: no such file, folder or Hub dataset that can be reached from here") from None
    except Exception as error:  # connection, configuration and file errors of many kinds
        raise UsageError(f"{name} can't be opened as a dataset: {first_line(error)}") from None
    splits = list(builder.info.splits or builder.config.data_files or ())
    chosen = choose_split(name, [str(known) for known in splits], split)
    try:
        return datasets.load_dataset(name, subset, split=chosen)
    except Exception as error:
        raise UsageError(f"{name}, split {chosen}, can't be read as a dataset: {first_line(error)}") from None


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

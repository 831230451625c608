"""Rows of Parquet files and Hugging Face datasets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.input.kept_columns import strict_json
from pagedbatch.input.row import RawRow
from pagedbatch.wording import first_line, short

_BATCH_ROWS = 1024


def parquet_columns(name: str, path: Path) -> tuple[str, ...]:
    """The columns of a Parquet file.

    Raises:
        UsageError: the file is damaged, or two columns share a name.
    """
    with _open_parquet(name, path) as file:
        columns = tuple(file.schema_arrow.names)
    return _each_once(name, columns)


def read_parquet(name: str, path: Path, first: int = 0) -> Iterator[RawRow]:
    """The rows of a Parquet file from row `first` on, a batch in memory at a time.

    Rows that lie in a damaged part of the file are error rows; those of other row groups are read.

    Raises:
        UsageError: the file is damaged as a whole.
    """
    import pyarrow

    with _open_parquet(name, path) as file:
        for group in range(file.metadata.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            done = min(first, num_rows)
            first -= done
            if done == num_rows:
                continue
            try:
                batches = file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group])
                for row in read_batches(batches, done):
                    yield row
                    done += 1
            except (pyarrow.ArrowException, OSError) as error:
                reason = f"row group {group} of the Parquet file is damaged: {first_line(error)}"
                yield from (RawRow(error=reason) for _ in range(done, num_rows))


def _open_parquet(name: str, path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{name} is not a readable Parquet file: {first_line(error)}") from None


def read_dataset(dataset: Any, first: int = 0) -> Iterator[RawRow]:
    """The rows of a `datasets.Dataset` from `first` on: as stored, so that images and audio are not decoded.

    Raises:
        UsageError: its files are damaged.
    """
    import pyarrow

    try:
        yield from read_batches(dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS), first)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"the dataset's files are damaged: {first_line(error)}") from None


def read_batches(batches: Iterable[Any], first: int = 0) -> Iterator[RawRow]:
    """The rows of Arrow tables; those before `first` never become Python objects."""
    for batch in batches:
        if first < batch.num_rows:
            yield from _rows(batch.slice(first))
        first = max(0, first - batch.num_rows)


def _rows(batch: Any) -> Iterator[RawRow]:
    """The rows of a table. One that holds what Python can't, such as a date beyond its own, is an error row."""
    try:
        found = batch.to_pylist()
    except Exception:  # a value's own error: of its text, its date, its time zone, ...
        yield from (_row(batch.slice(row, 1)) for row in range(batch.num_rows))
    else:
        yield from map(RawRow, found)


def _row(batch: Any) -> RawRow:
    """The only row of `batch`."""
    fields: dict[str, Any] = {}
    problem: str | None = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            fields[name] = column[0].as_py()
        except Exception as error:
            problem = problem or f"column {short(name)} holds a value that can't be read: {first_line(error)}"
    row_id = fields.get("id")
    if problem is None:
        return RawRow(fields)
    is_id = isinstance(row_id, (int, str)) and not isinstance(row_id, bool)
    return RawRow(error=problem, readable_id=row_id if is_id else None)


def _each_once(name: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    twice = next((column for column, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"{name}: the column {short(twice)} stands twice: rename one")
    return columns


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

    Columns of images, sounds and other bytes, which JSON has no form for, are left out.

    Raises:
        UsageError: as `load_dataset`, or a row can't be written as JSON.
    """
    import datasets

    if split is not None and "[" in split:
        raise UsageError(f"--split {split}: a slice needs the whole dataset; use --limit, or leave --streaming out")
    chosen = _known_split(name, split, subset)
    try:
        dataset = _without_bytes(datasets.load_dataset(name, subset, split=chosen, streaming=True))
        for fields in islice(dataset, limit):
            yield strict_json(fields) + b"\n"
    except Exception as error:
        raise UsageError(f"{name}, split {chosen}, can't be streamed: {first_line(error)}") from None


def _without_bytes(dataset: Any) -> Any:
    if dataset.features is None:
        return dataset
    dataset = dataset.decode(False)
    return dataset.remove_columns([name for name, feature in dataset.features.items() if _holds_bytes(feature)])


def _holds_bytes(feature: Any) -> bool:
    """Whether values of a `datasets` feature are bytes, or become more than JSON can hold by being decoded."""
    if hasattr(feature, "decode_example") or "binary" in str(getattr(feature, "dtype", "")):
        return True
    inner = feature if isinstance(feature, (dict, list)) else getattr(feature, "feature", None)
    parts = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else [inner]
    return any(_holds_bytes(part) for part in parts if part is not None)


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

"""Opens the input, whatever it is, and gives its rows one at a time.

What the input is is told by its content. A source can be read more than once: the job surveys it before it starts, then
feeds from it, and never holds more than a few rows.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.fingerprint import Content
from pagedbatch.input.files.arrow_rows import (
    load_dataset,
    open_saved_dataset,
    read_dataset,
    stream_dataset,
)
from pagedbatch.input.files.open_file import open_row_file
from pagedbatch.input.row import RawRow, Row, id_hash, place_row
from pagedbatch.wording import short

MAX_LINE_BYTES = 64 << 20
_COLUMNS_LISTED = 40
_DUPLICATES_LISTED = 3


@dataclass(frozen=True, slots=True)
class Source:
    """An opened input. `read` begins a new pass over its rows from a given one on, and parses none before it.

    `columns` is None where each row has its own. `label` names the format where not the content decided on it. `hint`
    is what may help where the rows can't be read, or lack a column.

    `spool` keeps the copy of a stream alive. Columns in `ignored` are data, whatever their names mean as options.
    """

    content: Content
    columns: tuple[str, ...] | None
    read: Callable[[int], Iterator[RawRow]]
    spool: Any = None
    ignored: frozenset[str] = frozenset()
    label: str | None = None
    hint: str = ""

    @property
    def name(self) -> str:
        return self.content.name

    def rows(self, limit: int | None = None, *, first: int = 0) -> Iterator[Row]:
        """A new pass over the first `limit` rows, without those before row `first`."""
        num_rows = None if limit is None else max(0, limit - first)
        for index, raw in enumerate(islice(self.read(first), num_rows), first):
            yield place_row(raw, index, self.ignored)


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass over the input found. `columns` are those of any row, the first ones when there are many.

    `is_cut`: the input goes on behind the limit.
    """

    num_rows: int
    columns: tuple[str, ...]
    has_all_columns: bool
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How an input is to be read; `split`, `subset` and `streaming` are for datasets, `csv_delimiter` for CSV."""

    split: str | None = None
    subset: str | None = None
    streaming: bool = False
    max_line_bytes: int = MAX_LINE_BYTES
    limit: int | None = None
    ignore_columns: tuple[str, ...] = ()
    csv_delimiter: str | None = None


def open_source(name: str, options: ReadOptions = ReadOptions()) -> Source:
    """Opens `name`: a file, `-` for stdin, a folder, or a dataset of the Hub.

    Raises:
        UsageError: it is missing or not readable as any of these; one line says what to do.
    """
    return replace(_open(name, options), ignored=frozenset(options.ignore_columns))


def _open(name: str, options: ReadOptions) -> Source:
    if name == "-":
        _refuse_split("stdin", options)
        return _spooled("stdin", sys.stdin.buffer, options)
    try:
        return _open_named(name, options)
    except OSError as error:
        raise UsageError(f"{short(name)} can't be read: {error.strerror or error}") from None


def _open_named(name: str, options: ReadOptions) -> Source:
    path = Path(name)
    kind = _kind(name)
    if kind is not None and stat.S_ISDIR(kind):
        return _open_folder(path, options)
    if kind is not None:
        _refuse_split(name, options)
        if stat.S_ISREG(kind):
            return _open_file(name, path, options)
        with path.open("rb") as pipe:
            return _spooled(name, pipe, options)
    if _looks_like_path(name):
        raise UsageError(f"{name}: no such file or folder")
    _refuse_delimiter(name, options)
    return _load_dataset(name, options)


def _kind(name: str) -> int | None:
    """What stands at a path, as `os.stat` tells; None if nothing does."""
    try:
        return os.stat(name).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: a zero byte
        return None


def survey(
    source: Source,
    *,
    limit: int | None,
    allow_duplicate_ids: bool,
    on_row: Callable[[Row], None] | None = None,
) -> Survey:
    """Reads the whole input once: counts its rows, collects its columns, and refuses ids that stand there twice.

    `on_row` is shown each row that can be read. Memory: eight bytes for each row with an id of its own.

    Raises:
        UsageError: two rows have the same id, or no row can be read.
    """
    num_rows = num_broken = 0
    first_error: str | None = None
    columns = dict.fromkeys(source.columns or ())
    hashes = array("Q")
    is_cut = False
    for row in source.rows():
        if num_rows == limit:
            is_cut = True
            break
        num_rows += 1
        if row.error is not None:
            first_error = first_error or row.error
            num_broken += 1
        elif on_row is not None:
            on_row(row)
        if source.columns is None and len(columns) < _COLUMNS_LISTED:
            columns.update(dict.fromkeys(row.fields))
        if row.has_own_id and row.id is not None and row.error is None:
            hashes.append(id_hash(row.id))
    if num_broken == num_rows and not is_cut and first_error is not None:
        raise UsageError(f"{source.name} holds no row that can be read: {first_error}{source.hint}")
    if not allow_duplicate_ids:
        repeated = _repeated(hashes)
        if repeated:
            _refuse_duplicates(source, limit, repeated)
    has_all = source.columns is not None or len(columns) < _COLUMNS_LISTED
    return Survey(num_rows, tuple(columns), has_all, is_cut)


def _repeated(hashes: array[int]) -> set[int]:
    import numpy as np

    values, counts = np.unique(np.frombuffer(hashes, dtype=np.uint64), return_counts=True)
    return {int(value) for value in values[counts > 1]}


def _refuse_duplicates(source: Source, limit: int | None, repeated: set[int]) -> None:
    """Reads the input again for the places of ids whose hashes occur twice: rows with equal hashes may still differ."""
    places: dict[Any, list[str]] = {}
    for row in source.rows(limit):
        if row.has_own_id and row.id is not None and row.error is None and id_hash(row.id) in repeated:
            places.setdefault((type(row.id), row.id), []).append(row.place.removeprefix("line "))
    duplicates = {row_id: found for (_, row_id), found in places.items() if len(found) > 1}
    if not duplicates:
        return
    named = [f"{row_id!r} in {_listed(found)}" for row_id, found in islice(duplicates.items(), _DUPLICATES_LISTED)]
    more = f" and {len(duplicates) - len(named)} more" if len(duplicates) > len(named) else ""
    raise UsageError(
        f"{source.name}: ids stand more than once: {'; '.join(named)}{more}. "
        "Make them unique or pass --allow-duplicate-ids"
    )


def _listed(places: list[str]) -> str:
    head = ", ".join(places[:_DUPLICATES_LISTED])
    rest = len(places) - _DUPLICATES_LISTED
    unit = "" if places[0].startswith("row") else "lines "
    return f"{unit}{head}" + (f" and {rest} more" if rest > 0 else "")


def _refuse_split(name: str, options: ReadOptions) -> None:
    for flag, value in (("--split", options.split), ("--subset", options.subset), ("--streaming", options.streaming)):
        if value:
            raise UsageError(f"{flag} is for datasets, and {name} is one file: leave it out")


def _refuse_delimiter(name: str, options: ReadOptions) -> None:
    if options.csv_delimiter is not None:
        raise UsageError(f"--csv-delimiter is for CSV files, and {name} is a dataset: leave it out")


def _looks_like_path(name: str) -> bool:
    """A Hub name is `name` or `owner/name`; anything with a data file's ending or a deeper path was meant as a path."""
    endings = (".jsonl", ".json", ".gz", ".zst", ".csv", ".tsv", ".tab", ".parquet", ".txt", ".text")
    return name.lower().endswith(endings) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _spooled(name: str, stream: Any, options: ReadOptions) -> Source:
    """A stream can be read only once, so it is kept in a temporary file, which goes with the source."""
    spool = _new_spool()
    with _room_for_spool(name):
        shutil.copyfileobj(stream, spool)
        spool.flush()
    return _open_file(name, Path(spool.name), options, spool)


def _new_spool() -> Any:
    return tempfile.NamedTemporaryFile(prefix="pagedbatch-input-")


@contextmanager
def _room_for_spool(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{name} can't be kept in {tempfile.gettempdir()}: {error.strerror} (TMPDIR chooses)"
        ) from None


def _open_file(name: str, path: Path, options: ReadOptions, spool: Any = None) -> Source:
    file = open_row_file(
        name,
        path,
        max_line_bytes=options.max_line_bytes,
        csv_delimiter=options.csv_delimiter,
        ignored=options.ignore_columns,
    )
    return Source(file.content, file.columns, file.rows, spool, label=file.label, hint=file.hint)


def _open_folder(folder: Path, options: ReadOptions) -> Source:
    _refuse_delimiter(str(folder), options)
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        if options.subset is not None:
            raise UsageError(f"{folder} is a saved dataset without subsets: leave --subset out")
        if options.streaming:
            raise UsageError(f"{folder} is a saved dataset, which is read piece by piece anyway: leave --streaming out")
        return _dataset_source(str(folder), open_saved_dataset(folder, options.split))
    if not any(folder.iterdir()):
        raise UsageError(f"{folder}: the folder is empty")
    return _load_dataset(str(folder), options)


def _load_dataset(name: str, options: ReadOptions) -> Source:
    if not options.streaming:
        return _dataset_source(name, load_dataset(name, split=options.split, subset=options.subset))
    spool = _new_spool()
    with _room_for_spool(name):
        for line in stream_dataset(name, split=options.split, subset=options.subset, limit=options.limit):
            spool.write(line)
        spool.flush()
    return _open_file(name, Path(spool.name), replace(options, max_line_bytes=sys.maxsize - 1), spool)


def _dataset_source(name: str, dataset: Any) -> Source:
    content = Content(name, dataset.num_rows, (str(dataset._fingerprint),))
    return Source(content, tuple(dataset.column_names), partial(read_dataset, dataset))

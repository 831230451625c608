"""Opens the input, whatever it is, and gives its rows one at a time. Knows nothing about prompts or models.

What the input is is told by its content. A source can be read more than once: the job surveys it before it starts, then
feeds from it, and never holds more than a few rows.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.job.compression import is_compressed, open_stream
from pagedbatch.job.fingerprint import Content, file_content
from pagedbatch.job.jsonl import STREAM_ERRORS, csv_columns, read_csv, read_jsonl
from pagedbatch.job.rows import RawRow, Row, id_hash, place_row
from pagedbatch.job.tables import (
    load_dataset,
    open_parquet,
    open_saved_dataset,
    read_dataset,
    read_parquet,
    stream_dataset,
)

MAX_LINE_BYTES = 64 << 20
_HEAD_BYTES = 1 << 16
_COLUMNS_LISTED = 40
_DUPLICATES_LISTED = 3


@dataclass(frozen=True, slots=True)
class Source:
    """An opened input. `read` begins a new pass over its rows from a given one on, and parses none before it.

    `columns` is None where each row has its own.

    `spool` keeps the copy of a stream alive. Columns in `ignored` are data, whatever their names mean as options.
    """

    content: Content
    columns: tuple[str, ...] | None
    read: Callable[[int], Iterator[RawRow]]
    spool: Any = None
    ignored: frozenset[str] = frozenset()

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
    """How an input is to be read; `split`, `subset` and `streaming` are for datasets."""

    split: str | None = None
    subset: str | None = None
    streaming: bool = False
    max_line_bytes: int = MAX_LINE_BYTES
    limit: int | None = None
    ignore_columns: tuple[str, ...] = ()


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
    path = Path(name)
    if path.is_dir():
        return _open_folder(path, options)
    if path.exists():
        _refuse_split(name, options)
        if path.is_file():
            return _open_file(name, path, options)
        with path.open("rb") as pipe:
            return _spooled(name, pipe, options)
    if _looks_like_path(name):
        raise UsageError(f"{name}: no such file or folder")
    return _load_dataset(name, options)


def survey(
    source: Source,
    *,
    limit: int | None,
    allow_duplicate_ids: bool,
    on_row: Callable[[Row], None] | None = None,
) -> Survey:
    """Reads the whole input once: counts its rows, collects its columns, and refuses ids that stand there twice.

    `on_row` is shown each row that can be read. Memory: eight bytes a row with an id of its own.

    Raises:
        UsageError: two rows have the same id.
    """
    num_rows = 0
    columns = dict.fromkeys(source.columns or ())
    hashes = array("Q")
    is_cut = False
    for row in source.rows():
        if num_rows == limit:
            is_cut = True
            break
        num_rows += 1
        if on_row is not None and row.error is None:
            on_row(row)
        if source.columns is None and len(columns) < _COLUMNS_LISTED:
            columns.update(dict.fromkeys(row.fields))
        if row.has_own_id and row.id is not None and row.error is None:
            hashes.append(id_hash(row.id))
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


def _looks_like_path(name: str) -> bool:
    """A Hub name is `name` or `owner/name`; anything with a data file's ending or a deeper path was meant as a path."""
    endings = (".jsonl", ".json", ".gz", ".zst", ".csv", ".tsv", ".parquet", ".txt")
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
    try:
        return _open_regular_file(name, path, options, spool)
    except PermissionError:
        raise UsageError(f"{name}: permission denied") from None


def _open_regular_file(name: str, path: Path, options: ReadOptions, spool: Any) -> Source:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        with open_parquet(path) as parquet:
            columns = tuple(parquet.schema_arrow.names)
        return Source(file_content(name, path, may_grow=False), columns, lambda first: read_parquet(path, first), spool)
    head = _head(name, path)
    content = file_content(name, path, may_grow=not is_compressed(magic))
    most = options.max_line_bytes
    if _is_csv(name, head):
        columns = tuple(csv_columns(open_stream(path)))
        ignored = options.ignore_columns
        return Source(content, columns, lambda first: _read_csv(path, most, first, ignored), spool)
    return Source(content, None, lambda first: _read_jsonl(path, most, first), spool)


def _read_jsonl(path: Path, max_line_bytes: int, first: int) -> Iterator[RawRow]:
    with open_stream(path) as stream:
        yield from read_jsonl(stream, max_line_bytes=max_line_bytes, first=first)


def _read_csv(path: Path, max_line_bytes: int, first: int, ignored: tuple[str, ...]) -> Iterator[RawRow]:
    """Where a row of CSV begins only its reader can tell, so that those before `first` are read and dropped."""
    return islice(read_csv(open_stream(path), max_line_bytes=max_line_bytes, ignored=ignored), first, None)


def _head(name: str, path: Path) -> bytes:
    """The first bytes of a text file, decompressed; refuses what is plainly something else."""
    with open_stream(path) as stream:
        try:
            head = stream.read(_HEAD_BYTES)
        except STREAM_ERRORS:
            return b""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in head[:4]:
        raise UsageError(f"{name}, line 1: this is UTF-16 or UTF-32: convert it first (iconv -f UTF-16 -t UTF-8)")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"[") and text[1:].lstrip().startswith(b"{"):
        raise UsageError(f"{name} is one JSON array: write one object a line first (jq -c '.[]')")
    return text


def _is_csv(name: str, text: bytes) -> bool:
    if text.startswith((b"{", b"[")):
        return False
    plain_name = name.lower().removesuffix(".gz").removesuffix(".zst")
    header = text.partition(b"\n")[0].strip().split(b",")
    return plain_name.endswith(".csv") or b"prompt" in header or b'"prompt"' in header


def _open_folder(folder: Path, options: ReadOptions) -> Source:
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
    return Source(content, tuple(dataset.column_names), lambda first: read_dataset(dataset, first))

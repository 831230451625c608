"""Opens the input, whatever it is, and gives its rows one at a time. Knows nothing about prompts or models.

What the input is is told by its content. A source can be read more than once: the job surveys it before it starts, then
feeds from it, and never holds more than a few rows.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.job.compression import open_stream
from pagedbatch.job.jsonl import STREAM_ERRORS, csv_columns, read_csv, read_jsonl
from pagedbatch.job.rows import RawRow, Row, id_hash, place_row
from pagedbatch.job.tables import load_dataset, open_parquet, open_saved_dataset, read_dataset, read_parquet

_HEAD_BYTES = 1 << 16
_COLUMNS_LISTED = 40
_DUPLICATES_LISTED = 3


@dataclass(frozen=True, slots=True)
class Source:
    """An opened input. `read` begins a new pass over its rows; `columns` is None where each row has its own.

    `fingerprint` changes when the content does. `spool` keeps the copy of a stream alive.
    """

    name: str
    fingerprint: str
    columns: tuple[str, ...] | None
    read: Callable[[], Iterator[RawRow]]
    spool: Any = None

    def rows(self, limit: int | None = None) -> Iterator[Row]:
        """A new pass over the first `limit` rows."""
        for index, raw in enumerate(islice(self.read(), limit)):
            yield place_row(raw, index)


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass over the input found. `columns` are those of any row, the first ones when there are many."""

    num_rows: int
    columns: tuple[str, ...]


def open_source(name: str, *, split: str | None = None, subset: str | None = None) -> Source:
    """Opens `name`: a file, `-` for stdin, a folder, or a dataset of the Hub.

    Raises:
        UsageError: it is missing or not readable as any of these; one line says what to do.
    """
    if name == "-":
        _refuse_split("stdin", split, subset)
        return _spooled("stdin", sys.stdin.buffer)
    path = Path(name)
    if path.is_dir():
        return _open_folder(path, split, subset)
    if path.exists():
        _refuse_split(name, split, subset)
        if path.is_file():
            return _open_file(name, path)
        with path.open("rb") as pipe:
            return _spooled(name, pipe)
    if _looks_like_path(name):
        raise UsageError(f"{name}: no such file or folder")
    return _dataset_source(name, load_dataset(name, split=split, subset=subset))


def survey(source: Source, *, limit: int | None, allow_duplicate_ids: bool) -> Survey:
    """Reads the whole input once: counts its rows, collects its columns, and refuses ids that stand there twice.

    Memory: eight bytes a row.

    Raises:
        UsageError: two rows have the same id.
    """
    num_rows = 0
    columns = dict.fromkeys(source.columns or ())
    hashes = array("Q")
    for row in source.rows(limit):
        num_rows += 1
        if source.columns is None and len(columns) < _COLUMNS_LISTED:
            columns.update(dict.fromkeys(row.fields))
        if row.has_own_id and row.id is not None and row.error is None:
            hashes.append(id_hash(row.id))
    if not allow_duplicate_ids:
        repeated = _repeated(hashes)
        if repeated:
            _refuse_duplicates(source, limit, repeated)
    return Survey(num_rows, tuple(columns))


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


def _refuse_split(name: str, split: str | None, subset: str | None) -> None:
    if split is not None or subset is not None:
        flag = "--split" if split is not None else "--subset"
        raise UsageError(f"{flag} is for datasets, and {name} is one file: leave it out")


def _looks_like_path(name: str) -> bool:
    """A Hub name is `name` or `owner/name`; anything with a data file's ending or a deeper path was meant as a path."""
    endings = (".jsonl", ".json", ".gz", ".zst", ".csv", ".tsv", ".parquet", ".txt")
    return name.lower().endswith(endings) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _spooled(name: str, stream: Any) -> Source:
    """A stream can be read only once, so it is kept in a temporary file, which goes with the source."""
    spool = tempfile.NamedTemporaryFile(prefix="pagedbatch-input-")  # noqa: SIM115 - lives as long as the source
    shutil.copyfileobj(stream, spool)
    spool.flush()
    return _open_file(name, Path(spool.name), spool)


def _open_file(name: str, path: Path, spool: Any = None) -> Source:
    try:
        return _open_regular_file(name, path, spool)
    except PermissionError:
        raise UsageError(f"{name}: permission denied") from None


def _open_regular_file(name: str, path: Path, spool: Any) -> Source:
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
        file.seek(0)
        fingerprint = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if is_parquet:
        with open_parquet(path) as parquet:
            columns = tuple(parquet.schema_arrow.names)
        return Source(name, fingerprint, columns, lambda: read_parquet(path), spool)
    head = _head(name, path)
    if _is_csv(name, head):
        columns = tuple(csv_columns(open_stream(path)))
        return Source(name, fingerprint, columns, lambda: read_csv(open_stream(path)), spool)
    return Source(name, fingerprint, None, lambda: _read_jsonl(path), spool)


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with open_stream(path) as stream:
        yield from read_jsonl(stream)


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


def _open_folder(folder: Path, split: str | None, subset: str | None) -> Source:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        if subset is not None:
            raise UsageError(f"{folder} is a saved dataset without subsets: leave --subset out")
        return _dataset_source(str(folder), open_saved_dataset(folder, split))
    if not any(folder.iterdir()):
        raise UsageError(f"{folder}: the folder is empty")
    return _dataset_source(str(folder), load_dataset(str(folder), split=split, subset=subset))


def _dataset_source(name: str, dataset: Any) -> Source:
    fingerprint = f"{dataset._fingerprint}:{dataset.num_rows}"
    return Source(name, fingerprint, tuple(dataset.column_names), lambda: read_dataset(dataset))

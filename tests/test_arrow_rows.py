"""Rows of Parquet files and datasets that hold what Python or the disk can't: error rows, and the others intact."""

from __future__ import annotations

import datetime
import io
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from pagedbatch.errors import UsageError
from pagedbatch.input.reader import ReadOptions, Row, open_source, survey


def write(folder: Path, table: Any, **options: Any) -> Path:
    from pyarrow import parquet

    path = folder / "in.parquet"
    parquet.write_table(table, path, **options)
    return path


def rows_of(path: Path, first: int = 0) -> list[Row]:
    return list(open_source(str(path)).rows(first=first))


def bad_utf8() -> Any:
    import pyarrow as pa

    offsets = b"".join(offset.to_bytes(4, "little") for offset in (0, 1, 2, 3))
    return pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"a\xffc")])


def out_of_range(kind: str) -> Any:
    """Three values, the second beyond what Python can say."""
    import pyarrow as pa

    if kind == "bad utf-8":
        return bad_utf8()
    if kind == "date":
        return pa.array([1, 10**8, 2], pa.int32()).cast(pa.date32())
    kinds = {"timestamp": (pa.timestamp("us"), 9 * 10**18), "duration": (pa.duration("s"), 2**60)}
    arrow_type, value = kinds[kind]
    return pa.array([1, value, 2], pa.int64()).cast(arrow_type)


@pytest.mark.parametrize("kind", ["bad utf-8", "date", "timestamp", "duration"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_value_that_python_can_not_hold_is_one_error_row(tmp_path: Path, kind: str, nested: bool) -> None:
    import pyarrow as pa

    column = out_of_range(kind)
    if nested:
        column = pa.StructArray.from_arrays([column], ["inner"])
    path = write(tmp_path, pa.table({"id": ["x", "y", "z"], "prompt": ["a", "b", "c"], "odd": column}))
    before, bad, after = rows_of(path)
    assert (before.id, before.fields["prompt"], before.error) == ("x", "a", None)
    assert (after.id, after.fields["prompt"], after.error) == ("z", "c", None)
    assert bad.id == "y"
    assert str(bad.error).startswith("row 1: column 'odd' holds a value that can't be read: ")
    assert [row.id for row in rows_of(path, first=1)] == ["y", "z"]


def test_values_of_every_kind(tmp_path: Path) -> None:
    import pyarrow as pa

    columns = {
        "bytes": pa.array([b"\xff", None]),
        "decimal": pa.array([Decimal("1.50"), None], pa.decimal128(38, 2)),
        "large": pa.array([2**64 - 1, None], pa.uint64()),
        "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        "dictionary": pa.array(["a", None]).dictionary_encode(),
        "nested": pa.array([{"a": [None, {"b": None}]}, None]),
        "nothing": pa.nulls(2),
        "day": pa.array([datetime.date(2020, 1, 2), None]),
        "not a number": pa.array([float("nan"), None]),
    }
    first, second = rows_of(write(tmp_path, pa.table(columns | {"prompt": ["a", "b"]})))
    assert first.error is None is second.error
    assert first.fields["nested"] == {"a": [None, {"b": None}]}
    assert (first.fields["large"], first.fields["decimal"]) == (2**64 - 1, Decimal("1.50"))
    assert {name for name, value in second.fields.items() if value is not None} == {"prompt"}


def test_columns_that_share_a_name_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"])
    with pytest.raises(UsageError, match="the column 'prompt' stands twice: rename one"):
        open_source(str(write(tmp_path, table)))


def test_a_table_without_columns_or_rows_is_no_traceback(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.table({"prompt": pa.array([], pa.string())})
    assert rows_of(write(tmp_path, table)) == []
    assert rows_of(write(tmp_path, table.select([]))) == []


def test_damage_in_one_row_group_leaves_the_others(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    prompts = [f"prompt {i * 7919 % 1000}" for i in range(300)]
    path = write(tmp_path, pa.table({"prompt": prompts}), row_group_size=100, compression="gzip", use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    start = column.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    rows = rows_of(path)
    assert [row.fields.get("prompt") for row in rows] == [*prompts[:100], *[None] * 100, *prompts[200:]]
    assert all("row group 1 of the Parquet file is damaged" in str(row.error) for row in rows[100:200])
    assert [row.index for row in rows_of(path, first=150)] == list(range(150, 300))
    assert survey(open_source(str(path)), limit=None, allow_duplicate_ids=False).num_rows == 300


def test_damage_anywhere_is_no_traceback(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pa.table({"id": [1, 2, 3], "prompt": ["a", "b", "c"]}), sink)
    data = sink.getvalue()
    path = tmp_path / "in.parquet"
    for place in range(0, len(data), 41):
        for damaged in (data[:place], data[:place] + b"\xff\x00" + data[place + 2 :]):
            path.write_bytes(damaged)
            with suppress(UsageError):
                rows_of(path)


def test_images_and_sounds_that_are_not_needed_are_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    odd = [{"bytes": b"no image", "path": None}] * 2
    dataset = datasets.Dataset.from_dict({"prompt": ["a", "b"], "image": odd, "sound": odd})
    dataset = dataset.cast_column("image", datasets.Image()).cast_column("sound", datasets.Audio())
    dataset.save_to_disk(tmp_path / "saved")
    (tmp_path / "data").mkdir()
    dataset.to_parquet(tmp_path / "data" / "train.parquet")
    streamed = open_source(str(tmp_path / "data"), ReadOptions(streaming=True))
    assert [dict(row.fields) for row in streamed.rows()] == [{"prompt": "a"}, {"prompt": "b"}]
    for name in ("saved", "data"):
        rows = list(open_source(str(tmp_path / name)).rows())
        assert [(row.fields["prompt"], row.error) for row in rows] == [("a", None), ("b", None)]


def test_a_saved_dataset_with_bad_text_has_an_error_row(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa

    table = pa.table({"prompt": bad_utf8()})
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    rows = list(open_source(str(tmp_path / "saved")).rows())
    assert [row.fields.get("prompt") for row in rows] == ["a", None, "c"]
    assert "column 'prompt' holds a value that can't be read" in str(rows[1].error)

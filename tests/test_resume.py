"""Runs that are broken off, taken up, retried and finished on a real model: each row once, each answer right."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from workplace import View, Workplace

from pagedbatch.errors import UsageError
from pagedbatch.output.parquet import schema


def _interrupt_after(rows: int) -> View:
    """A view that sends SIGINT once so many rows are done."""
    sent: list[int] = []

    def interrupt(rows_done: int) -> None:
        if rows_done >= rows and not sent:
            sent.append(rows_done)
            os.kill(os.getpid(), signal.SIGINT)

    return View(interrupt)


def _bytes(path: Path) -> bytes:
    data = path.read_bytes()
    path.unlink()
    return data


def test_two_thousand_rows_in_a_pool_of_32_blocks(letters: Workplace) -> None:
    """Two samples a row, error rows of three kinds, an interrupt, a resume: as if nothing had happened."""
    rows: list[Any] = [{"id": f"r{i}", "prompt": "abcdefmnpqtz"[i % 12] * (1 + i % 15)} for i in range(2000)]
    for i in range(0, 2000, 100):
        rows[i] = {"id": f"r{i}", "prompt": ""}
        rows[i + 1] = f'{{"id": "r{i + 1}", "prompt":'
        rows[i + 2] = {"id": f"r{i + 2}", "prompt": "a" * 250, "max_tokens": 6, "n": 40}  # never fits
    settings = {"n": 2, "max_tokens": 6, "num_blocks": 32, "max_num_seqs": 64}
    letters.write(rows)
    assert letters.run(**settings).exit_code == 3
    whole = letters.output.read_bytes()
    records = letters.records()
    assert [record["id"] for record in records] == [f"r{i}" for i in range(2000)]
    assert sum(record["status"] == "error" for record in records) == 60
    assert all(len(record["outputs"]) == 2 for record in records if record["status"] == "ok")
    assert letters.stats["memory"]["final_live_blocks"] == 0
    assert letters.stats["memory"]["peak_live_blocks"] <= 32
    for path in (letters.output, letters.journal.with_suffix(".finished")):
        path.unlink()

    assert letters.run(_interrupt_after(700), **settings).exit_code == 130
    assert not letters.output.exists()
    assert letters.stats["rows"]["ok"] + letters.stats["rows"]["error"] < 2000
    assert letters.run(**settings).exit_code == 3
    assert letters.stats["rows"] == {
        "total": 2000,
        "ok": 1940,
        "error": 60,
        "resumed": letters.stats["rows"]["resumed"],
    }
    assert letters.stats["rows"]["resumed"] >= 700
    assert letters.stats["memory"]["final_live_blocks"] == 0
    assert letters.output.read_bytes() == whole


def test_error_rows_are_retried_and_nothing_else(letters: Workplace) -> None:
    letters.write([{"id": i, "prompt": "z" * size, "max_tokens": 4} for i, size in enumerate((3, 100, 3, 120))])
    view = View()
    assert letters.run(view, num_blocks=4).exit_code == 3
    assert view.notices == ["2 rows are errors: the same command with --retry-errors runs these again"]
    assert [record["status"] for record in letters.records()] == ["ok", "error", "ok", "error"]
    assert not letters.journal.exists()
    view = View()
    assert letters.run(view, num_blocks=4).exit_code == 3  # all is done: nothing runs
    assert view.opened_with is None

    view = View()
    assert letters.run(view, num_blocks=64, retry_errors=True).exit_code == 0
    assert view.notices[:2] == ["2 error rows run again", "resuming: 2 of 4 rows are finished already"]
    assert view.rows_done == 2
    assert [record["status"] for record in letters.records()] == ["ok"] * 4
    assert not letters.journal.exists()


def test_one_error_row_is_no_plural(letters: Workplace) -> None:
    letters.write([{"id": i, "prompt": "z" * size, "max_tokens": 4} for i, size in enumerate((3, 100))])
    view = View()
    assert letters.run(view, num_blocks=4).exit_code == 3
    assert view.notices == ["1 row is an error: the same command with --retry-errors runs it again"]
    view = View()
    assert letters.run(view, num_blocks=64, retry_errors=True).exit_code == 0
    assert view.notices[:2] == ["1 error row runs again", "resuming: 1 of 2 rows is finished already"]


def test_a_higher_limit_goes_on_where_the_lower_one_ended(letters: Workplace) -> None:
    letters.write([{"id": f"r{i}", "prompt": "cz"[i % 2]} for i in range(30)])
    assert letters.run(limit=10, max_tokens=3).exit_code == 0
    first = letters.output.read_bytes()
    assert len(letters.records()) == 10
    assert letters.run(limit=20, max_tokens=3).exit_code == 0
    assert letters.stats["rows"] == {"total": 20, "ok": 20, "error": 0, "resumed": 10}
    assert letters.output.read_bytes().startswith(first)
    assert letters.run(limit=30, max_tokens=3).exit_code == 0
    assert letters.stats["rows"]["resumed"] == 20
    assert [record["id"] for record in letters.records()] == [f"r{i}" for i in range(30)]
    assert not letters.journal.exists()


def test_rows_with_different_fields_stand_alone(letters: Workplace) -> None:
    rows = [
        {"id": 1, "prompt": "c", "system": "s"},
        {"id": "1", "prompt": "c", "meta": {"deep": [1, {"x": None}]}},
        {"q": 1},
    ]
    letters.write(rows)
    assert letters.run(keep="*").exit_code == 3
    records = letters.records()
    assert [record["id"] for record in records] == [1, "1", 2]
    assert [record["input"] for record in records] == rows
    assert records[2]["error"] == "line 3: no prompt: the row needs prompt, messages or prompt_token_ids"


def test_a_wrong_column_of_a_dataset_is_told_with_its_split(letters: Workplace) -> None:
    import datasets

    folder = letters.folder / "set"
    part = datasets.Dataset.from_dict({"problem": ["c", "bd"], "meta": [{"text": "c"}, None]})
    datasets.DatasetDict({"test": part, "train": part}).save_to_disk(folder)
    given = {"input": str(folder), "split": "test"}
    with pytest.raises(UsageError, match=r"set, split test, has no column 'question'; its columns are problem, meta$"):
        letters.run(prompt_column="question", model="/no/model", **given)
    assert letters.run(prompt_column="problem", **given).exit_code == 0
    assert [record["outputs"][0]["text"] for record in letters.records()] == ["fgh", "efgh"]
    assert letters.run(prompt_column="meta.text", **given).exit_code == 3
    assert [record["status"] for record in letters.records()] == ["ok", "error"]
    assert letters.run(prompt_column="meta", **given).exit_code == 3
    assert "column 'meta' must hold text" in letters.records()[0]["error"]


def test_a_finished_run_with_errors_gives_way_to_a_changed_one(letters: Workplace) -> None:
    letters.write([{"prompt": "c"}, {"prompt": ""}])
    assert letters.run().exit_code == 3
    letters.write([{"prompt": "bd"}, {"prompt": "c"}])
    assert letters.run(max_tokens=2).exit_code == 0
    assert [record["outputs"][0]["text"] for record in letters.records()] == ["ef", "fg"]


def test_rows_added_to_the_input_are_answered_on_resume(letters: Workplace) -> None:
    rows = [{"id": i, "prompt": "zz"} for i in range(40)]
    letters.write(rows)
    assert letters.run(_interrupt_after(5), max_tokens=9, max_num_seqs=4).exit_code == 130
    resumed = letters.stats["rows"]["ok"]
    letters.write([*rows, {"id": "new", "prompt": "c"}])
    assert letters.run(max_tokens=9).exit_code == 0
    assert letters.stats["rows"] == {"total": 41, "ok": 41, "error": 0, "resumed": resumed}
    assert letters.records()[-1]["outputs"][0]["text"] == "fgh"


def test_another_model_under_the_same_name_does_not_resume(letters: Workplace, rand_model_path: Path) -> None:
    model = letters.folder / "model"
    shutil.copytree(letters.model, model)
    letters.write([{"prompt": "zz"} for _ in range(40)])
    assert letters.run(_interrupt_after(5), model=str(model), max_num_seqs=4, max_tokens=9).exit_code == 130
    shutil.rmtree(model)
    shutil.copytree(rand_model_path, model)
    with pytest.raises(UsageError, match="model: its files changed"):
        letters.run(model=str(model), max_tokens=9)
    assert letters.run(max_tokens=9).exit_code == 0  # the same files elsewhere


def test_strict_lists_all_bad_lines_before_the_weights_are_loaded(
    letters: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken ones and those that can't be prepared, in one pass."""
    bad = ['{"id":"3","prompt":', {"prompt": ""}, {"prompt": "c", "n": "x"}, {"prompt": "a" * 300}, '{"prompt": "c']
    letters.write([{"prompt": "c"}, *bad, {"prompt": "c"}])
    view = View()
    with monkeypatch.context() as patch:
        patch.setattr("pagedbatch.run.job.set_up_engine", lambda *_: pytest.fail("the weights were loaded"))
        with pytest.raises(UsageError, match="--strict: 5 of 7 rows can't be answered; nothing was started"):
            letters.run(view, strict=True)
    assert [notice.partition(":")[0] for notice in view.notices] == [f"line {i}" for i in range(2, 7)]
    assert [path.name for path in letters.folder.iterdir()] == ["in.jsonl"]
    letters.write([{"prompt": "c"}])
    assert letters.run(strict=True).exit_code == 0


def test_kept_columns_stand_in_good_and_bad_records(letters: Workplace) -> None:
    letters.write(
        [
            {"prompt": "c", "gold": 3, "meta": {"level": "é"}},
            {"prompt": "", "gold": [1]},
            "nonsense",
            {"prompt": "c", "gold": "\ud800"},
        ]
    )
    assert letters.run(keep="gold,meta.level").exit_code == 3
    records = letters.records()
    assert [record["input"] for record in records] == [
        {"gold": 3, "meta.level": "é"},
        {"gold": [1], "meta.level": None},
        {"gold": None, "meta.level": None},
        {"gold": None, "meta.level": None},
    ]
    assert records[3]["error"].startswith("line 4: --keep: a value holds half of a surrogate pair")
    with pytest.raises(UsageError, match=r"--keep: .* has no column 'nope'; its columns are prompt, gold, meta$"):
        letters.run(keep=["nope"], restart=True)


def test_parquet_output_says_what_jsonl_says(letters: Workplace) -> None:
    rows = [
        {"id": "x", "prompt": "a", "n": 2, "temperature": 1, "logprobs": 1, "tag": 1},
        {"id": 2, "prompt": ""},
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "c"}},
        {"id": "beams", "prompt": "a", "num_beams": 2},
    ]
    letters.write(rows)
    output = letters.folder / "out.parquet"
    assert letters.run(output=str(output), keep="tag").exit_code == 3
    assert {path.name for path in letters.folder.iterdir()} == {
        "in.jsonl",
        "out.parquet",
        "out.parquet.finished",
        "out.stats.json",
    }
    table = parquet.read_table(output)
    assert table.schema.equals(schema())
    found = table.to_pylist()
    assert [row["id"] for row in found] == ["x", "2", "b", "beams"]
    assert [json.loads(row["input"]) for row in found] == [{"tag": 1}, *[{"tag": None}] * 3]
    letters.run(keep="tag")
    for row, record in zip(found, letters.records(), strict=True):
        if "custom_id" in record:
            assert row["outputs"][0]["text"] == record["response"]["body"]["choices"][0]["text"]
            continue
        assert (row["index"], row["status"], row["error"]) == (record["index"], record["status"], record["error"])
        for mine, theirs in zip(row["outputs"], record["outputs"], strict=True):
            stop_reason = theirs["stop_reason"]
            expected = {**theirs, "stop_reason": None if stop_reason is None else str(stop_reason)}
            assert _without(mine, "bytes", "reasoning") == _without(expected)


def _without(value: Any, *keys: str) -> Any:
    """Without these keys where they are null: a record that has nothing to say there leaves them out."""
    if isinstance(value, list):
        return [_without(item, *keys) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without(item, *keys) for key, item in value.items() if item is not None or key not in keys}


def test_a_cut_input_is_answered_as_far_as_it_goes(letters: Workplace) -> None:
    data = b"".join(
        json.dumps({"id": i, "prompt": "c", "x": os.urandom(20).hex()}).encode() + b"\n" for i in range(300)
    )
    cut = letters.folder / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(data)[:-2000])
    assert letters.run(input=str(cut), max_tokens=1).exit_code == 3
    *good, last = letters.records()
    assert [record["id"] for record in good] == list(range(len(good)))
    assert {record["status"] for record in good} == {"ok"}
    assert len(good) > 100
    assert last["status"] == "error"
    assert "breaks off here" in last["error"]

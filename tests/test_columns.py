"""What is said of columns before a run starts: options that are not here, typing mistakes, data that is let pass."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from field_strategies import KEYS, VALUES
from hypothesis import given
from hypothesis import strategies as st
from log_lines import log_lines
from tiny_job import SilentView, without_model

from pagedbatch.errors import UsageError
from pagedbatch.input.fields.columns import ColumnWatch
from pagedbatch.input.fields.field_table import KNOWN, LACKED
from pagedbatch.input.fields.near_names import is_one_edit_away, nearest_option
from pagedbatch.input.fields.row_fields import read_fields
from pagedbatch.input.reader import open_source
from pagedbatch.input.row import RawRow, place_row
from pagedbatch.run.job import JobResult, run_job
from pagedbatch.settings import merge


def _watch(*rows: dict[str, Any], **given: Any) -> tuple[list[str], str | None]:
    """The notices about rows, and the refusal."""
    settings = merge({"input": "in", "model": "m", "output": "o", **given}, {})
    watch, told = ColumnWatch(settings), []
    for index, fields in enumerate(rows):
        watch.see(place_row(RawRow(fields, line=index + 1), index, frozenset(settings.ignore_columns)))
    with log_lines(told):
        watch.log_near_misses("in")
    try:
        watch.refuse_lacked("in")
    except UsageError as refused:
        return told, str(refused)
    return told, None


def _run(folder: Path, told: list[str], data: str, name: str = "in.jsonl", **given: Any) -> JobResult:
    (folder / name).write_text(data)
    paths = {"input": str(folder / name), "output": str(folder / "out.jsonl"), "model": "none"}
    with without_model(), log_lines(told):
        return run_job(merge({**paths, "max_tokens": 3, **given}, {}), lambda *_: SilentView())


def test_an_option_that_is_not_here_stops_the_run_at_its_first_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "typical_p": None}, {"prompt": "c", "typical_p": 0.9}]
    data = "\n".join(map(json.dumps, rows))
    with pytest.raises(UsageError) as refused:
        _run(tmp_path, [], data)
    assert str(refused.value) == (
        f"{tmp_path}/in.jsonl: rows ask for what this program does not have: "
        '"typical_p" (line 3; here there is top_p or min_p). '
        "Take the column out, or let it pass as data with --ignore-columns typical_p"
    )
    assert not (tmp_path / "out.jsonl").exists()
    assert _run(tmp_path, [], data, ignore_columns=["typical_p"]).exit_code == 0


def test_every_such_option_is_refused_with_the_flag(tmp_path: Path) -> None:
    """Each with a value that is its own kind; none with null, false or what is empty."""
    values: list[Any] = [
        7, True, "other", [{"name": "f"}], {"voice": "x"}, {"type": "content"}, {"effort": "low"}, {"max_new_tokens": 5}
    ]  # fmt: skip
    for name in LACKED:
        refusals = [_watch({name: value})[1] for value in values]
        assert any(refusal is not None and f"--ignore-columns {name}" in refusal for refusal in refusals), name
        for value in (None, False, "", [], {}, *LACKED[name].neutral):
            assert _watch({name: value}) == ([], None)
        assert _watch(*({name: value} for value in values), ignore_columns=[name]) == ([], None)


def test_many_such_columns_are_counted() -> None:
    row = dict.fromkeys(["typical_p", "top_a", "mirostat", "eta_cutoff", "xtc_probability"], 0.5)
    refusal = _watch(row)[1]
    assert refusal is not None
    assert refusal.count("(line 1") == 3
    assert "and 2 more" in refusal
    assert refusal.endswith("--ignore-columns typical_p,top_a,mirostat,eta_cutoff,xtc_probability")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("temprature", "temperature"), ("temperatur", "temperature"), ("tempereture", "temperature"),
        ("tepmerature", "temperature"), ("Temperature", "temperature"), ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"), ("max-tokens", "max_tokens"), ("top-p", "top_p"), ("topP", "top_p"),
        ("topK", "top_k"), ("N", "n"), ("ID", "id"), ("stpo", "stop"), ("sop", "stop"), ("sed", "seed"),
        ("max_new_token", "max_new_tokens"), ("samplingParams", "sampling_params"), ("promt", "prompt"),
        ("enable_thinkng", "enable_thinking"), ("num_beam", "num_beams"), ("jsonSchema", "json_schema"),
    ],
)  # fmt: skip
def test_a_typing_mistake_is_told_once_with_its_first_place(key: str, meant: str) -> None:
    rows = [{"prompt": "a", key: None}, {"prompt": "a", key: 1}, {"prompt": "a", key: 2}]
    assert _watch(*rows) == ([f'in, line 2: column "{key}" is not read; did you mean "{meant}"?'], None)
    assert _watch(*rows, ignore_columns=[key]) == ([], None)
    assert _watch(*rows, keep=[key]) == ([], None)
    assert _watch(*rows, prompt_template=f"{{{key}}}") == ([], None)


def test_data_columns_pass_without_a_word() -> None:
    names = """
        user metadata name input inputs output outputs answer answers label labels question questions category model url
        text title context source level topic score system task_id instruction response completion reference solution
        problem difficulty split index idx key lang language message step tool document documents choices entry_point
        test canonical_solution prefix target summary article dialogue persona x y k a b date author
    """
    assert _watch({name: "data" for name in names.split() if name not in KNOWN}) == ([], None)
    assert _watch({"user": "u", "metadata": {"a": 1}, "model": "m", "audio": {"bytes": "", "path": "p"}}) == ([], None)


def test_a_column_that_makes_the_prompt_is_data() -> None:
    row = {"prefix": "def f(", "suffix": "return x"}
    assert _watch(row)[1] is not None
    assert _watch(row, prompt_template="{prefix}<fill>{suffix}") == ([], None)
    assert _watch({"suffix": "x"}, prompt_column="suffix") == ([], None)


def test_batch_rows_are_left_to_themselves() -> None:
    assert _watch({"custom_id": "a", "url": "u", "body": {"typical_p": 0.5}, "typical_p": 0.5}) == ([], None)


def test_every_key_of_every_row_is_seen(tmp_path: Path) -> None:
    """More columns than a message lists, each row with its own; and no more is kept than what is told."""
    rows = [{"prompt": "a", **{f"column {i} {j}": 1 for j in range(10)}} for i in range(50)]
    rows += [{"prompt": "a", f"temperatur{letter}": 1} for letter in "abcdfghijklmnopqrstuvwxyz"]
    told: list[str] = []
    assert _run(tmp_path, told, "\n".join(map(json.dumps, rows))).exit_code == 0
    assert sum("did you mean" in line for line in told) == 20
    assert "line 51: column" in told[0]
    with pytest.raises(UsageError, match='"top_a"'):
        _run(tmp_path, [], "\n".join(map(json.dumps, [*rows, {"prompt": "a", "top_a": 0.5}])), restart=True)


def test_control_characters_of_a_name_are_escaped() -> None:
    told, _ = _watch({"stop\x1b": 1})
    assert told == ['in, line 1: column "stop\\u001b" is not read; did you mean "stop"?']


def test_a_table_with_an_empty_column_of_such_a_name_runs(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    assert _run(tmp_path, [], "prompt,typical_p,mirostat,echo\na,,0,False\nb,1.0,,\n", "in.csv").exit_code == 0
    with pytest.raises(UsageError, match=r'"typical_p" \(line 3'):
        _run(tmp_path, [], "prompt,typical_p\na,\nb,0.5\n", "in.csv", restart=True)
    for value, refused in ((None, False), (0.5, True)):
        parquet.write_table(pa.table({"prompt": ["a", "b"], "top_a": [None, value]}), tmp_path / "table")
        given = {"model": "none", "output": str(tmp_path / "o.jsonl"), "input": str(tmp_path / "table")}
        with without_model():
            settings = merge({**given, "max_tokens": 2}, {})
            if refused:
                with pytest.raises(UsageError, match=r'"top_a" \(row 1'):
                    run_job(settings, lambda *_: SilentView())
            else:
                assert run_job(settings, lambda *_: SilentView()).exit_code == 0


def test_cells_of_csv_are_what_the_option_takes(tmp_path: Path) -> None:
    """Numbers and switches as JSON, and as pandas writes them; texts and structures as text."""
    structures = {
        "tools": [{"type": "function"}], "response_format": {"type": "json_object"}, "sampling_params": {"n": 2},
    }  # fmt: skip
    cells = {
        "max_new_tokens": "5", "do_sample": "True", "ignore_eos": "False", "stop_sequences": "12", "guided_regex": "1",
        "typical_p": "1.0", **{name: json.dumps(value) for name, value in structures.items()},
    }  # fmt: skip
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, cells.keys())
        writer.writeheader()
        writer.writerow(cells)
    (row,) = open_source(str(tmp_path / "in.csv")).rows()
    assert dict(row.fields) == {
        **cells, "max_new_tokens": 5, "do_sample": True, "ignore_eos": False, "typical_p": 1.0
    }  # fmt: skip
    without_format = {name: value for name, value in row.fields.items() if name != "response_format"}
    assert read_fields(without_format) == {
        "max_tokens": 5, "do_sample": True, "ignore_eos": False, "stop": "12", "regex": "1", "n": 2,
        "tools": structures["tools"],
    }  # fmt: skip


def test_own_names_may_be_data_too(tmp_path: Path) -> None:
    """In CSV their cells stay the text that they are; records may still carry them."""
    data = "prompt,n,seed,q\na,three,0.50,1e3\n"
    given = {"prompt_template": "{n} {seed}", "keep": ["n", "seed"], "max_tokens": 2}
    assert _run(tmp_path, [], data, "in.csv", **given).exit_code == 3
    ignored = {**given, "ignore_columns": ["n,seed"], "restart": True}
    assert _run(tmp_path, [], data, "in.csv", **ignored).exit_code == 0
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert record["input"] == {"n": "three", "seed": "0.50"}
    assert record["usage"]["prompt_tokens"] == len("three 0.50")


def test_ignored_columns_are_a_part_of_what_a_run_is(tmp_path: Path) -> None:
    """But a journal of a version without the setting is one of a run that ignored none."""
    data = '{"prompt": "a", "n": 1}\n{"prompt": "", "n": 0}\n'
    for ignored, written in (([], False), (["n"], True)):
        assert _run(tmp_path, [], data, ignore_columns=ignored).exit_code == 3
        manifest = (tmp_path / "out.jsonl.finished").read_bytes().partition(b"\n")[0]
        assert (b'"ignore_columns": ["n"]' in manifest) is written
        assert (b"ignore_columns" in manifest) is written
    with pytest.raises(UsageError, match=r"--ignore-columns: .* has no column 'm'; its columns are prompt, n"):
        _run(tmp_path, [], data, ignore_columns=["m"])


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_whatever_a_row_holds_is_seen_without_a_fault(fields: dict[str, Any]) -> None:
    told, refusal = _watch({"prompt": "a", **fields})
    assert all(len(line.splitlines()) == 1 for line in [*told, *filter(None, [refusal])])


@given(st.text("abc_", max_size=6), st.text("abc_", max_size=6))
def test_one_edit_is_one_letter_more_less_or_other_or_two_swapped(one: str, other: str) -> None:
    edits = {one[:i] + one[i + 1 :] for i in range(len(one))}
    edits |= {one[:i] + letter + one[i:] for i in range(len(one) + 1) for letter in "abc_"}
    edits |= {one[:i] + letter + one[i + 1 :] for i in range(len(one)) for letter in "abc_"}
    edits |= {one[:i] + one[i + 1] + one[i] + one[i + 2 :] for i in range(len(one) - 1)}
    assert is_one_edit_away(one, other) == (other in edits - {one})


def test_a_key_that_means_something_is_no_mistake() -> None:
    assert [name for name in KNOWN if nearest_option(name) is not None] == []
    assert nearest_option("x" * 1000) is None
    assert [name for name in ("min", "max", "top", "tops", "step", "document") if nearest_option(name)] == []

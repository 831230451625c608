"""The reports of a run: what they say, how wide and long they are, what they refuse; charts and wording."""

from __future__ import annotations

import json
import re
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from snapshots import finished_row, snapshot
from stats_files import RECIPES, run_stats, shown, stats_of, stats_of_recipe

from pagedbatch.cli.report import open_stats, report
from pagedbatch.errors import UsageError
from pagedbatch.params import GenerationParams
from pagedbatch.report.charts import ASCII, UNICODE, Part, cells, sparkline, stacked_bar
from pagedbatch.report.details import details
from pagedbatch.report.summary import summary
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.schema import Stats
from pagedbatch.wording import duration, percent, plural, size


def test_the_summary() -> None:
    lines = shown(run_stats())
    assert lines[:7] == [
        "rows      10: 9 ok, 1 error, 3 of them resumed",
        "speed     30 tokens/s: 60 out in 2.0 s, start-up 4.2 s",
        "pool      20 blocks of 16 tokens, 20.0 MiB; 50% live, 50% at peak",
        "sharing   50.0% saved, on average 10 blocks, 10.0 MiB; 4 CoW copies",
        "prefixes  25 of 100 prompt tokens found in the cache (25.0%)",
        "preempted swap 2 (10 blocks), recompute 1 (44 tokens)",
        "time      model 50%  attention 25%  sampling 12%  host 6%  io 6%",
    ]
    assert lines[9] == "paged, this run    " + "█" * 27 + "░" * 9 + "   75.0%            4.0"
    assert [line[:17] for line in lines[10:13]] == ["contiguous max   ", "contiguous pow2  ", "contiguous oracle"]
    assert "2 sequences" in lines[13]


@pytest.mark.parametrize("show", [summary, details])
@pytest.mark.parametrize("scale", [1, 1000, 40_000])
def test_reports_fit_80_columns(show: Any, scale: int) -> None:
    lines = shown(run_stats(scale), show)
    assert all(len(line) <= 80 for line in lines)
    wide = shown(run_stats(scale), show, width=200)
    assert [line.rstrip() for line in lines] == [line.rstrip() for line in wide], "nothing is cut or wrapped"
    if show is summary:
        assert len(lines) <= 20


def test_a_narrow_console_wraps_the_words_and_cuts_the_bars() -> None:
    lines = shown(run_stats(), width=40)
    assert all(len(line) <= 40 for line in lines)
    assert "4 CoW copies" in " ".join(line.strip() for line in lines)


def test_a_run_that_was_cut_off() -> None:
    stats = run_stats()
    stats["rows"] = {"total": 1000, "ok": 400, "error": 2, "resumed": 0}
    assert shown(stats)[0] == "rows      1,000: 400 ok, 2 errors, 598 not done"


@pytest.mark.parametrize("show", [summary, details])
def test_reports_in_ascii(show: Any) -> None:
    file = BytesIO()
    console = Console(file=TextIOWrapper(file, encoding="ascii"), width=80)
    show(Stats.from_json(run_stats()), console)
    console.file.flush()
    assert "##" in file.getvalue().decode("ascii")


def test_a_run_without_a_step_has_no_chart() -> None:
    lines = shown(run_stats(steps=0))
    assert lines[1:] == [
        "speed     no token was generated",
        "pool      20 blocks of 16 tokens, 20.0 MiB; no step ran",
        "time      nothing was timed",
    ]
    sections = shown(run_stats(steps=0), details)
    assert "Over the run" not in sections
    assert "Versions" in sections


def test_the_chart_fits_a_narrow_terminal() -> None:
    title, *bars = shown(run_stats(), summary, width=60)[-6:-1]
    assert title.endswith("seqs at once")
    assert max(map(len, [title, *bars])) <= 60
    assert all(re.search(r"\d%\s+[\d.]+$", bar) for bar in bars), "the numbers are there, the bars give way"


def test_an_ordinary_greedy_run_names_what_did_not_happen() -> None:
    account = MemoryAccount(num_blocks=20, block_size=16, block_bytes=2**20)
    account.observe(snapshot(private=10, free=10, filled_slots=100, running_sequences=4))
    lines = shown(stats_of(account))
    assert lines[3:6] == ["sharing   none; 0 CoW copies", "prefixes  cache not used", "preempted none"]
    assert "contiguous" not in "".join(lines), "no row finished: nothing was replayed"


def test_the_details() -> None:
    lines = shown(run_stats(), details)
    text = "\n".join(lines)
    paged = next(line for line in lines if line.startswith("paged"))
    assert paged == "paged, this run    " + "█" * 27 + "▒" * 9 + "    75%    0%   25%    0%"
    assert "live blocks        ██ " in text
    assert "KV used            ▆▆ " in text
    assert "tokens/s           █▁ " in text, "all tokens came in the first step"
    assert "30 to 30, mean 30" in text
    assert "10.0 MiB swapped in 0.12 s of the model's time" in text
    assert "3.00 MiB of host memory held swapped blocks at most" in text
    assert "20 to 30, mean 25" in text
    assert 'some/model"' in text
    settings = [line.split() for line in lines[lines.index("Versions") - 8 : lines.index("Versions") - 1]]
    assert [words[0] for words in settings] == [
        "Setting", "model", "dtype", "stop", "prompt_template", "block_size", "device",
    ], "defaults come last"  # fmt: skip
    assert settings[2] == ["dtype", '"float32"', "command", "line"]
    assert settings[6] == ["device", '"auto":', '"cpu"', "default"]
    assert "[bold]" in text, "settings are no markup"


def test_sequences_that_never_fit_are_named() -> None:
    account = MemoryAccount(num_blocks=4, block_size=16, block_bytes=1)
    account.observe(snapshot(private=4, filled_slots=60, running_sequences=1))
    account.row_finished(finished_row(0, 30, [20]), GenerationParams(max_tokens=100), 4096)
    text = "\n".join(shown(stats_of(account), details))
    assert "max: 1 of 1 sequence has no chunk large enough in this memory" in text
    assert "oracle: 1" not in text


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.stats.json"
    path.write_text(json.dumps(run_stats()), encoding="utf-8")
    report([path])
    printed = capsys.readouterr().out
    assert "50.0% saved" in printed
    assert "Over the run" in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1, 2]", "the file is not an object"),
        (b'{"settings": {}, "versions": {}}', "rows is missing"),
        (b'{"settings": {}, "versions": {}, "rows": {"total": 1}}', "rows.ok is missing"),
        (b'{"settings": {}, "versions": {}, "rows": 5}', "rows is not an object"),
    ],
)
def test_a_file_that_is_no_stats_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "out.stats.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_stats(path)


def test_a_contiguous_scheme_that_is_not_there(tmp_path: Path) -> None:
    stats = run_stats()
    del stats["memory"]["contiguous"]["pow2"]
    path = tmp_path / "out.stats.json"
    path.write_text(json.dumps(stats), encoding="utf-8")
    with pytest.raises(UsageError, match=r"memory\.contiguous\.pow2 is missing"):
        open_stats(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        open_stats(tmp_path / "none.stats.json")


def test_the_output_in_place_of_its_stats(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"id": 1}\n{"id": 2}\n', encoding="utf-8")
    (tmp_path / "out.stats.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match=r"did you mean .*out\.stats\.json\?"):
        open_stats(tmp_path / "out.jsonl")


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(0, 100))
def test_cells_of_a_bar(values: list[int], width: int) -> None:
    counts = cells(values, width)
    assert sum(counts) == (width if any(values) else 0)
    assert all(count == 0 for count, value in zip(counts, values, strict=True) if value == 0)
    if width >= len(values):
        assert all(count >= 1 for count, value in zip(counts, values, strict=True) if value > 0)
    if any(values):
        exact = [value * width / sum(values) for value in values]
        assert all(abs(count - share) <= len(values) for count, share in zip(counts, exact, strict=True))


def test_a_bar_of_nothing_is_blank() -> None:
    assert stacked_bar([Part(0, "#"), Part(0, ".")], 5).plain == "     "


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, UNICODE) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2, UNICODE) == "▁█"
    assert sparkline([1, 1], 8, UNICODE, top=2.0) == "▅▅"
    assert sparkline([0, 0], 8, ASCII) == "__"
    assert sparkline([], 8, ASCII) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (duration(0.84), "0.8 s"),
        (duration(9.96), "10 s"),
        (duration(59.6), "1 min 00 s"),
        (duration(185), "3 min 05 s"),
        (duration(3599.7), "1 h 00 min"),
        (duration(7650), "2 h 08 min"),
        (size(980), "980 B"),
        (size(1000), "0.98 KiB"),
        (size(3.375 * 2**20), "3.38 MiB"),
        (size(12.5 * 2**30), "12.5 GiB"),
        (size(999 * 2**30), "999 GiB"),
        (size(2000 * 2**40), "2,000 TiB"),
        (percent(0.9634), "96.3%"),
        (percent(None), "-"),
        (plural(1, "row"), "1 row"),
        (plural(1000, "row"), "1,000 rows"),
        (plural(2, "copy", "copies"), "2 copies"),
    ],
)
def test_wording(words: str, expected: str) -> None:
    assert words == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_report_of_each_recipe(recipe: Path) -> None:
    stats = stats_of_recipe(recipe)
    lines = shown(stats, summary) + shown(stats, details)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    parts = ["sharing  ", "paged, this run", "contiguous oracle", "Over the run", "Lengths in tokens", "Setting"]
    assert [part for part in parts if part not in text] == []
    assert f"{stats['memory']['kv_used']:.1%}" in text

"""Shards put together: byte for byte the whole run, or refused with what is missing, twice there or of another run."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import parquet
from rich.console import Console
from test_job import MIXED, View, Workplace
from test_shard import ROWS, Folder

from pagedbatch.cli.report import open_stats, report
from pagedbatch.errors import PagedBatchError, RunError, UsageError
from pagedbatch.output.merge import Merged, merge_parts
from pagedbatch.report.details import details
from pagedbatch.report.summary import summary
from pagedbatch.stats.schema import Stats


class Parts(Folder):
    """Shards of ten rows, and what merging them gives."""

    def shards(self, *shards: str, **given: Any) -> list[str]:
        """Runs them; the output of `1/3` is `1of3.jsonl`."""
        names = [f"{shard.replace('/', 'of')}.jsonl" for shard in shards]
        for shard, name in zip(shards, names, strict=True):
            self.run(name, shard=shard, **given)
        return names

    def merge(self, *names: str, output: str = "merged.jsonl") -> Merged:
        self.notices.clear()
        place = output if output == "-" else str(self.path / output)
        return merge_parts([str(self.path / name) for name in names], place, self.notices.append)

    def refusal(self, *names: str, **given: Any) -> str:
        """The message, without the folder, of a merge that is refused and leaves everything as it was."""
        before = {path.name: path.read_bytes() for path in self.path.iterdir()}
        with pytest.raises(PagedBatchError) as refused:
            self.merge(*names, **given)
        assert {path.name: path.read_bytes() for path in self.path.iterdir()} == before
        assert "\n" not in str(refused.value)
        return str(refused.value).replace(f"{self.path}/", "")


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_a_real_model_gives_the_same_bytes_whole_and_in_shards(tmp_path: Path, rand_model_path: Path) -> None:
    """Greedy rows, samples, beams and error rows; without the cache, whose hits depend on who ran before."""
    words = Workplace(tmp_path, rand_model_path)
    rows: list[Any] = [*MIXED, {"id": "empty", "prompt": ""}, '{"id": "cut", "prompt":']
    rows[5:5] = [{"custom_id": "o", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "n": 2}}]
    words.write(rows)
    settings = {"max_tokens": 6, "prefix_cache": False, "max_num_seqs": 12}
    assert words.run(**settings).exit_code == 3
    names = [str(tmp_path / f"part-{i}.jsonl") for i in range(3)]
    for i, name in enumerate(names):
        words.run(shard=f"{i}/3", **{**settings, "output": name})
    merged = merge_parts(names[::-1], str(tmp_path / "merged.jsonl"), print)
    assert (merged.num_ok, merged.num_error, merged.exit_code) == (26, 1, 3)
    assert (tmp_path / "merged.jsonl").read_bytes() == words.output.read_bytes()


@pytest.mark.parametrize(
    "shards",
    [("0/1",), ("2/3", "0/3", "1/3"), ("1/2", "0/4", "1/4"), tuple(f"{i}/12" for i in range(12))],
)
def test_any_cut_in_any_order_is_the_whole(parts: Parts, shards: tuple[str, ...]) -> None:
    parts.run("whole.jsonl")
    merged = parts.merge(*parts.shards(*shards))
    assert (merged.num_parts, merged.num_ok, merged.num_error) == (len(shards), 9, 1)
    assert parts.read("merged.jsonl") == parts.read("whole.jsonl")
    assert not (parts.path / "merged.jsonl.journal").exists()


def test_all_rows_good_is_exit_code_0_and_no_rows_are_no_rows(parts: Parts) -> None:
    parts.write(ROWS[:4])
    assert parts.merge(*parts.shards("0/2", "1/2")).exit_code == 0
    parts.write([])
    assert parts.merge(*parts.shards("0/2", "1/2")).exit_code == 0
    assert parts.read("merged.jsonl") == b""


def test_parquet_and_stdout(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.run("whole.parquet")
    parts.run("whole.jsonl")
    names = parts.shards("0/2", "1/2")
    parts.merge(*names, output="merged.parquet")
    assert parquet.read_table(parts.path / "merged.parquet") == parquet.read_table(parts.path / "whole.parquet")
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=written))
    assert parts.merge(*names, output="-").paths is None
    assert written.getvalue() == parts.read("whole.jsonl")


def test_the_stats_add_up_what_adds_up(parts: Parts) -> None:
    names = parts.shards("0/3", "1/3", "2/3")
    parts.merge(*names)
    stats = parts.stats("merged")
    own = [parts.stats(name.removesuffix(".jsonl")) for name in names]
    assert stats["rows"] == {"total": 10, "ok": 9, "error": 1, "resumed": 0}
    assert [shard["stats"] for shard in stats["shards"]] == own
    for name in ("output_tokens", "prompt_tokens"):
        assert stats["throughput"][name] == sum(part["throughput"][name] for part in own)
    assert stats["throughput"]["seconds"] == pytest.approx(sum(part["throughput"]["seconds"] for part in own))
    memory, memories = stats["memory"], [part["memory"] for part in own]
    assert memory["num_blocks"] == 1000
    assert memory["peak_live_blocks"] == max(each["peak_live_blocks"] for each in memories)
    assert memory["cow_copies"] == sum(each["cow_copies"] for each in memories) > 0
    assert memory["contiguous"]["max"]["replayed"] == 13
    steps = [sum(point["steps"] for point in part["timeline"]) for part in own]
    live = sum(each["mean_live_blocks"] * weight for each, weight in zip(memories, steps, strict=True)) / sum(steps)
    assert memory["mean_live_blocks"] == pytest.approx(live, abs=1e-6)
    assert stats["settings"]["max_tokens"]["value"] == 3
    assert stats["settings"]["output"]["value"] == str(parts.path / "merged.jsonl")
    assert "shard" not in stats["settings"]
    console = Console(file=io.StringIO(), width=80)
    summary(open_stats(parts.path / "merged.stats.json"), console)
    details(Stats.from_json(stats), console)


def test_pools_of_different_blocks_have_no_common_account(parts: Parts) -> None:
    parts.merge(*parts.shards("0/2"), *parts.shards("1/2", block_size=8))
    assert parts.stats("merged")["memory"] is None
    assert "block_size" not in parts.stats("merged")["settings"]
    console = Console(file=io.StringIO(), width=80)
    summary(open_stats(parts.path / "merged.stats.json"), console)
    details(Stats.from_json(parts.stats("merged")), console)
    shown = console.file.getvalue()
    assert "pools     of blocks that differ in size: each has an account of its own\n" in shown
    assert re.search(r"0of2\.jsonl +5 .*%.*%.*%", shown)
    assert re.search(r"all +10 +1 +[\d,]+ +- +- +- ", shown)


def test_the_page_shows_pools_that_have_no_common_account_one_by_one(parts: Parts) -> None:
    pytest.importorskip("matplotlib", reason="the page needs the extra `report`")
    parts.merge(*parts.shards("0/2"), *parts.shards("1/2", block_size=8))
    report([parts.path / "merged.stats.json"], html=parts.path / "page.html")
    page = (parts.path / "page.html").read_text()
    assert "0of2.jsonl</h3>" in page
    assert "1of2.jsonl</h3>" in page


def test_gaps_and_overlaps_are_named(parts: Parts) -> None:
    a, b, c, d = parts.shards("0/4", "1/4", "2/4", "3/4")  # rows 0-1, 2-4, 5-6, 7-9
    whole = "the parts are not the whole of 10 rows: "
    assert parts.refusal(a, c) == f"{whole}rows 2-4 are in none (--shard 1/4); rows 7-9 are in none (--shard 3/4)"
    assert parts.refusal(d) == f"{whole}rows 0-6 are in none (--shard 0/4 to 2/4)"
    (third,) = parts.shards("1/3")  # rows 3-5
    overlaps = f"rows 3-4 are in {b} and in {third}; row"
    assert parts.refusal(a, b, c, d, third).startswith(f"{whole}{overlaps}s 5 are in {third} and in {c}")
    assert parts.refusal(a, third, d) == f"{whole}rows 2 are in none; rows 6 are in none"
    assert parts.refusal(a, b, a, c, d) == f"{a} is given twice"


def test_parts_of_other_runs_say_what_differs(parts: Parts) -> None:
    (first,) = parts.shards("0/2")
    (other,) = parts.shards("1/2", max_tokens=2)
    assert parts.refusal(first, other) == f"{first} and {other} are not of one run: max_tokens: 3 and 2"
    (other,) = parts.shards("1/2", limit=8)
    assert parts.refusal(first, other) == f"{first} and {other} are not of one run: rows in all: 10 and 8"
    parts.write([*ROWS[:9], {"id": "other", "prompt": "x"}])
    (other,) = parts.shards("1/2")
    assert parts.refusal(first, other) == f"{first} and {other} are not of one run: input: its content has changed"


def test_a_part_of_another_model_is_refused(parts: Parts) -> None:
    first, other = parts.shards("0/2", "1/2")
    stats = parts.stats("1of2")
    stats["shard"]["model"] = {"name": "tiny-2", "fingerprint": "other"}
    (parts.path / "1of2.stats.json").write_text(json.dumps(stats))
    assert parts.refusal(first, other) == f"{first} and {other} are not of one run: model: 'none' and 'tiny-2'"


def test_other_versions_are_told_and_merged(parts: Parts) -> None:
    names = parts.shards("0/2", "1/2")
    stats = parts.stats("1of2")
    stats["versions"]["torch"] = "1.0"
    (parts.path / "1of2.stats.json").write_text(json.dumps(stats))
    parts.merge(*names)
    assert parts.notices == ["the parts were written by different versions: see versions in their stats"]
    assert parts.stats("merged")["versions"]["torch"].endswith(" and 1.0")


def test_what_is_no_part_is_refused(parts: Parts) -> None:
    parts.run("whole.jsonl")
    first, second = parts.shards("0/2", "1/2")
    assert parts.refusal(first, "whole.jsonl") == "whole.jsonl is no part: whole.stats.json is of a run without --shard"
    assert parts.refusal(first, "none.jsonl") == "none.jsonl: no such file"
    assert parts.refusal(first, "no/such.jsonl") == "no/such.jsonl: no such file"
    assert parts.refusal(first, "x.parquet").startswith("x.parquet is Parquet: parts must be .jsonl")
    (parts.path / "alone.jsonl").write_bytes(parts.read(first))
    assert parts.refusal("alone.jsonl").startswith("alone.jsonl: its stats, alone.stats.json, can't be read")
    (parts.path / "alone.stats.json").write_text('{"shard": {}}')
    assert parts.refusal("alone.jsonl") == "alone.jsonl: alone.stats.json is not a stats file: settings is missing"
    assert parts.refusal(first, second, output=first).startswith(f"--output {first} would overwrite the input {first}")
    other = parts.refusal(first, second, output="0of2.parquet")
    assert other.startswith("--output 0of2.parquet would overwrite the input 0of2.stats.json")


def test_an_unfinished_part_says_how_to_finish_it(tmp_path: Path, rand_model_path: Path) -> None:
    words = Workplace(tmp_path, rand_model_path)
    words.write([{"prompt": f"{i}"} for i in range(40)])
    sent: list[int] = []

    def interrupt(rows_done: int) -> None:
        if rows_done and not sent:
            sent.append(rows_done)
            os.kill(os.getpid(), signal.SIGINT)

    settings = {"max_tokens": 3, "max_num_seqs": 4, "shard": "1/2"}
    assert words.run(View(interrupt), **settings).exit_code == 130
    with pytest.raises(UsageError) as refused:
        merge_parts([str(words.output)], str(tmp_path / "merged.jsonl"), print)
    command = f"pagedbatch run {tmp_path}/in.jsonl --model {rand_model_path} --shard 1/2 --output {words.output}"
    assert str(refused.value) == (
        f"{words.output} is unfinished: run `{command}` again, with the other options that it had"
    )
    assert words.run(**settings).exit_code == 0
    first = str(tmp_path / "first.jsonl")
    words.run(**{**settings, "shard": "0/2", "output": first})
    assert merge_parts([str(words.output), first], str(tmp_path / "merged.jsonl"), print).num_ok == 40


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[:-1], "1of2.jsonl ends after 4 of its 5 rows"),
        (lambda lines: [*lines[:-1], lines[-1][:-1]], "1of2.jsonl, line 5: cut or damaged: no record"),
        (lambda lines: [*lines[:2], lines[2][:9] + b"\n", *lines[3:]], "1of2.jsonl, line 3: cut or damaged: no record"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "1of2.jsonl, line 1: row 6 stands where row 5 should stand"),
        (lambda lines: [*lines, lines[-1]], "1of2.jsonl, line 6: row 9 stands where nothing should follow"),
        (
            lambda lines: [line.replace(b'"status": "error"', b'"status": "ok"') for line in lines],
            "1of2.jsonl holds 0 error rows, its stats speak of 1",
        ),
    ],
)
def test_a_damaged_part_replaces_nothing(parts: Parts, damage: Any, message: str) -> None:
    names = parts.shards("0/2", "1/2")
    parts.merge(*names)
    lines = parts.read("1of2.jsonl").splitlines(keepends=True)
    (parts.path / "1of2.jsonl").write_bytes(b"".join(damage(lines)))
    assert parts.refusal(*names) == message


def test_an_output_that_a_run_is_writing_is_refused(parts: Parts) -> None:
    names = parts.shards("0/2", "1/2")
    refused: list[str] = []

    def meanwhile(rows_done: int) -> None:
        if not refused:
            with pytest.raises(UsageError) as info:
                parts.merge(*names)
            refused.append(str(info.value))

    parts.run("merged.jsonl", meanwhile)
    assert refused[0].endswith("another run writes the same output")


def test_the_journal_of_an_unfinished_run_keeps_its_output(parts: Parts) -> None:
    names = parts.shards("0/2", "1/2")
    (parts.path / "merged.jsonl.journal").write_bytes(b"something")
    assert parts.refusal(*names) == "merged.jsonl.journal stands: finish its run, or choose another --output"


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_any_call_may_fail_or_be_the_last(parts: Parts, monkeypatch: pytest.MonkeyPatch, name: str, dies: bool) -> None:
    """The output is the old one or the whole new one, and the same merge again completes it."""
    names = parts.shards("0/2", "1/2")
    parts.merge(*names)
    good = parts.read("merged.jsonl")
    files = {path.name for path in parts.path.iterdir()}
    real = getattr(os, name)
    for nth in range(1, 100):
        (parts.path / "merged.jsonl").write_bytes(b"old")
        calls: list[None] = []

        def broken(*args: Any, nth: int = nth, calls: list[None] = calls) -> Any:
            calls.append(None)
            if len(calls) == nth:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                if dies:
                    os._exit(9)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        child = os.fork()
        if child == 0:
            code = 1
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(os, name, broken)
                    parts.merge(*names)
                code = 0
            except RunError as error:
                code = 3 if os.strerror(errno.ENOSPC) in str(error) else 4
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert parts.read("merged.jsonl") in (b"old", good)
        if code == 0:
            break
        assert code == (9 if dies else 3)
        parts.merge(*names)
        assert parts.read("merged.jsonl") == good
        assert {path.name for path in parts.path.iterdir()} == files
    assert nth > 2

"""A run from end to end on tiny models: the files it leaves."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from workplace import MIXED, View, Workplace

from pagedbatch.errors import UsageError


def test_the_record_of_an_answered_row(letters: Workplace) -> None:
    letters.write([{"id": "x", "prompt": "c"}])
    assert letters.run().exit_code == 0
    line = letters.output.read_bytes()
    assert line.endswith(b'"error": null}\n')
    (record,) = letters.records()
    (output,) = record.pop("outputs")
    assert record == {
        "id": "x",
        "index": 0,
        "status": "ok",
        "usage": {"prompt_tokens": 1, "completion_tokens": 4, "cached_tokens": 0},
        "error": None,
    }
    assert output.pop("cumulative_logprob") == pytest.approx(-0.2282, abs=1e-3)
    assert output == {
        "index": 0,
        "text": "fgh",
        "token_ids": [9, 10, 11, 2],
        "finish_reason": "stop",
        "stop_reason": 2,
        "score": None,
        "logprobs": None,
    }


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [("gh", "f", 3), (["h", "gh"], "f", 3), ("fgh", "", 3), ("zz", "fgh", 4), ("g", "f", 2)],
)
def test_a_stop_string_cuts_the_text_and_not_the_tokens(
    letters: Workplace, stop: Any, text: str, num_tokens: int
) -> None:
    letters.write([{"prompt": "c", "stop": stop}])
    letters.run()
    (output,) = letters.records()[0]["outputs"]
    assert (output["text"], len(output["token_ids"]), output["finish_reason"]) == (text, num_tokens, "stop")


def test_logprobs_name_their_tokens(letters: Workplace) -> None:
    letters.write([{"prompt": "a", "max_tokens": 1, "logprobs": k} for k in (0, 3)])
    letters.run()
    none, three = (record["outputs"][0]["logprobs"] for record in letters.records())
    assert none == [{"token_id": 5, "token": "b", "logprob": pytest.approx(-0.6931, abs=1e-3), "top_logprobs": []}]
    assert [entry["token"] for entry in three[0]["top_logprobs"]] == ["b", "c", "<eos>"]
    assert [entry["logprob"] for entry in three[0]["top_logprobs"]] == sorted(
        (entry["logprob"] for entry in three[0]["top_logprobs"]), reverse=True
    )


def test_beams_have_scores(letters: Workplace) -> None:
    letters.write([{"prompt": "a", "num_beams": 3, "n": 3, "max_tokens": 8}])
    letters.run()
    outputs = letters.records()[0]["outputs"]
    assert [output["text"] for output in outputs] == ["cfgh", "bdefgh", "befgh"]
    assert [output["score"] for output in outputs] == pytest.approx([-0.2865, -0.3905, -0.4265], abs=1e-4)


def test_broken_rows_are_records_and_the_others_go_on(letters: Workplace) -> None:
    rows = [
        {"id": "good", "prompt": "c"},
        '{"id": "cut", "prompt":',
        {"id": "empty", "prompt": ""},
        {"id": "long", "prompt": "a" * 257},
        {"id": "wide", "prompt": "a" * 100, "max_tokens": 150},
        {"id": "type", "prompt": "c", "max_tokens": "5"},
        {"id": "last", "prompt": "c"},
    ]
    letters.write(rows)
    view = View()
    result = letters.run(view, num_blocks=8, max_tokens=10)
    assert result.exit_code == 3
    records = letters.records()
    assert [record["index"] for record in records] == list(range(7))
    assert [record["id"] for record in records] == ["good", "cut", "empty", "long", "wide", "type", "last"]
    errors = {record["id"]: record["error"] for record in records if record["status"] == "error"}
    assert errors.keys() == {"cut", "empty", "long", "wide", "type"}
    for record in records:
        if record["status"] == "error":
            assert record["outputs"] == []
            assert set(record["usage"].values()) == {0}
    assert errors["cut"].startswith("line 2: malformed JSON")
    assert "257 tokens" in errors["long"]
    assert "blocks" in errors["wide"]
    assert "16" in errors["wide"]
    assert "8" in errors["wide"]
    assert (view.opened_with, view.rows_done, view.rows_error) == ((7, 0), 7, 5)
    assert letters.stats["rows"] == {"total": 7, "ok": 2, "error": 5, "resumed": 0}


def test_the_stats_hold_the_keys_of_the_contract(words: Workplace) -> None:
    words.write(MIXED[:6])
    words.run(max_tokens=12, seed=3)
    stats = words.stats
    records = words.records()
    assert stats.keys() >= {"settings", "versions", "rows", "throughput", "memory", "time", "timeline"}
    assert stats["settings"]["max_tokens"] == {"value": 12, "source": "command line"}
    assert stats["settings"]["top_p"] == {"value": 1.0, "source": "default"}
    assert stats["settings"]["block_size"] == {"value": 16, "source": "default"}
    assert stats["settings"]["attention"]["value"] == "auto"
    assert stats["settings"]["attention"]["used"] in ("torch", "cpu")
    assert stats["versions"].keys() >= {"pagedbatch", "python", "torch", "transformers"}
    throughput = stats["throughput"]
    assert throughput["prompt_tokens"] == sum(record["usage"]["prompt_tokens"] for record in records)
    assert throughput["output_tokens"] == sum(record["usage"]["completion_tokens"] for record in records)
    assert throughput["output_tokens_per_second"] > 0
    assert throughput["startup_seconds"] > 0
    memory = stats["memory"]
    assert (memory["num_blocks"], memory["block_size"], memory["final_live_blocks"]) == (64, 16, 0)
    assert 0 < memory["peak_live_blocks"] <= 64
    assert memory.keys() >= {"sharing_saving", "kv_used", "cow_copies", "preemptions", "prefix_cache", "contiguous"}
    assert stats["time"].keys() >= {"model", "attention", "sampling", "host", "io"}
    assert stats["time"]["io"] > 0


def test_a_rows_outputs_do_not_depend_on_the_others(words: Workplace) -> None:
    words.write(MIXED)
    words.run(max_tokens=20)
    one = {record["id"]: record["outputs"] for record in words.records()}
    words.write(MIXED[::-1])
    words.run(max_tokens=20, num_blocks=26, max_num_seqs=12, block_size=8, swap_space="1MiB")
    other = {record["id"]: record["outputs"] for record in words.records()}
    assert words.stats["memory"]["preemptions"] != {"swap": 0, "recompute": 0}
    assert one.keys() == other.keys()
    for row_id, outputs in one.items():
        assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in other[row_id]]
        assert [o["text"] for o in outputs] == [o["text"] for o in other[row_id]]


def test_records_to_stdout_in_order(letters: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    letters.write([{"id": i, "prompt": prompt} for i, prompt in enumerate(["bd", "c", "h"])])
    stdout = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=stdout))
    result = letters.run(output="-")
    assert result.paths is None
    assert [json.loads(line)["id"] for line in stdout.getvalue().splitlines()] == [0, 1, 2]
    assert [path.name for path in letters.folder.iterdir()] == ["in.jsonl"]


def test_no_rows_no_records(letters: Workplace) -> None:
    letters.write([])
    assert letters.run().exit_code == 0
    assert letters.output.read_bytes() == b""
    assert letters.stats["rows"] == {"total": 0, "ok": 0, "error": 0, "resumed": 0}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt_column": "nope"}, r"--prompt-column: .* has no column 'nope'; its columns are id, problem$"),
        ({"prompt_template": "{nope}"}, r"--prompt-template: .* has no column 'nope'; its columns are id, problem$"),
        ({}, "has no column prompt, messages or prompt_token_ids: choose one with --prompt-column"),
    ],
)
def test_a_column_that_no_row_has(letters: Workplace, settings: dict[str, Any], reason: str) -> None:
    letters.write([{"id": 1, "problem": "a"}])
    with pytest.raises(UsageError, match=reason):
        letters.run(model="/no/model", **settings)
    assert [path.name for path in letters.folder.iterdir()] == ["in.jsonl"]


def test_a_run_that_does_not_start_leaves_nothing(letters: Workplace) -> None:
    letters.write([{"prompt": "c"}])
    with pytest.raises(UsageError, match="no such folder"):
        letters.run(model="/no/model")
    with pytest.raises(UsageError, match="--chat"):
        letters.run(chat=True)
    with pytest.raises(UsageError, match="stop_token_ids: 5000 is no token id of this model"):
        letters.run(stop_token_ids=[5000])
    assert [path.name for path in letters.folder.iterdir()] == ["in.jsonl"]


def test_only_a_window_of_rows_is_read_ahead(letters: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedbatch.input.reader import Source

    letters.write([{"prompt": "zz"} for _ in range(60)])
    rows = Source.rows
    passes: list[int] = []

    def counted(self: Source, limit: int | None = None, *, first: int = 0) -> Iterator[Any]:
        passes.append(0)
        for row in rows(self, limit, first=first):
            passes[-1] += 1
            yield row

    monkeypatch.setattr(Source, "rows", counted)
    ahead: list[int] = []
    letters.run(View(lambda rows_done: ahead.append(passes[-1] - rows_done)), max_num_seqs=4, max_tokens=5)
    assert passes == [60, 60]
    assert max(ahead) <= 8 + 8 + 4  # in the engine, ahead of it, and in the hand of the thread

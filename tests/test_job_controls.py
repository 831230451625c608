"""Controls from a file of rows to its records: limits of length, prompts too long or empty, scoring, their sources."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from workplace import View, Workplace

CONTEXT = 256  # of the table model; the random one has 512


def answered(work: Workplace, rows: list[Any], **settings: Any) -> list[Any]:
    """The records of rows that are all right or of which some are wrong: the run itself goes through."""
    work.write(rows)
    result = work.run(**settings)
    assert result.exit_code == (3 if any(record["status"] == "error" for record in work.records()) else 0)
    return work.records()


def test_every_kind_of_length_limit(letters: Workplace) -> None:
    limits = [0, 1, -1, None, "5", 3]
    rows = [{"id": str(limit), "prompt": "c", "max_tokens": limit} for limit in limits]
    records = answered(letters, [*rows, {"id": "beams", "prompt": "c", "max_tokens": 1, "num_beams": 3}])
    texts = {record["id"]: record["outputs"][0]["text"] for record in records if record["status"] == "ok"}
    assert texts == {"0": "", "1": "f", "None": "fgh", "3": "fgh", "beams": "f"}
    errors = {record["id"]: record["error"] for record in records if record["status"] == "error"}
    assert errors == {
        "-1": "line 3: max_tokens must be 0 or more, got -1",
        "5": "line 5: max_tokens must be an integer, got '5'",
    }
    assert records[0]["outputs"][0]["finish_reason"] == "length"
    assert records[0]["usage"]["completion_tokens"] == 0


def test_scoring_alone(letters: Workplace) -> None:
    """The odds of `abd` are .50 and .35."""
    (scored, plain) = answered(letters, [{"prompt": "abd", "prompt_logprobs": 2}, {"prompt": "abd"}], max_tokens=0)
    first, second, third = scored["prompt_logprobs"]
    assert first is None
    assert (second["token"], third["token"]) == ("b", "d")
    assert [second["logprob"], third["logprob"]] == pytest.approx([math.log(0.5), math.log(0.35)], abs=1e-4)
    assert [top["token"] for top in third["top_logprobs"]] == ["<eos>", "d"]
    assert scored["outputs"][0]["token_ids"] == []
    assert "prompt_logprobs" not in plain
    assert letters.stats["memory"]["final_live_blocks"] == 0


def test_prompt_logprobs_in_openai_shape(letters: Workplace) -> None:
    body = {"prompt": "ab", "max_tokens": 0, "prompt_logprobs": 0}
    letters.write([{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}])
    letters.run()
    answer = letters.records()[0]["response"]["body"]
    assert answer["choices"][0]["text"] == ""
    assert answer["prompt_logprobs"][1]["logprob"] == pytest.approx(math.log(0.5), abs=1e-4)


def test_prompts_around_the_context(letters: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    lengths = [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 5000]
    records = answered(letters, [{"prompt": "z" * length} for length in lengths], max_tokens=20, ignore_eos=True)
    assert [record["status"] for record in records] == ["ok", "ok", "error", "error", "error"]
    assert [record["usage"]["completion_tokens"] for record in records] == [20, 1, 0, 0, 0]
    assert "the prompt has 5000 tokens, and the model's limit of 256 leaves no room for one" in records[4]["error"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_cut_to_fit(words: Workplace, side: str) -> None:
    """The token that comes next tells which tokens the model saw."""
    text = "".join(chr(ord("a") + i % 26) for i in range(600))
    num_kept = 512 - 8 - 1  # beside BOS
    kept = text[-num_kept:] if side == "left" else text[:num_kept]
    rows = [{"prompt": text, "truncate_prompt": side}, {"prompt": kept}, {"prompt": text}]
    cut, whole, refused = answered(words, rows, max_tokens=8)
    assert cut["usage"]["truncated_tokens"] == 601 - 504
    assert cut["usage"]["prompt_tokens"] == 504
    assert "truncated_tokens" not in whole["usage"]
    assert cut["outputs"] == whole["outputs"]
    assert "--truncate-prompt" in refused["error"]


@pytest.mark.parametrize("model", ["letters", "words"])
def test_empty_prompts_hurt_nobody(model: str, request: pytest.FixtureRequest) -> None:
    """One tokenizer writes BOS, so that an empty text is a prompt; the other has nothing to start from."""
    work: Workplace = request.getfixturevalue(model)
    odd: list[dict[str, Any]] = [
        {"prompt": ""}, {"prompt": " "}, {"prompt": None}, {}, {"prompt_token_ids": []}, {"messages": []},
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for each in odd:
        rows += [{"prompt": "a"}, each]
    records = answered(work, [*rows, {"prompt": "a"}], max_tokens=2)
    assert {record["status"] for record in records[::2]} == {"ok"}
    assert len({str(record["outputs"]) for record in records[::2]}) == 1
    expected = ["ok" if model == "words" else "error", "ok", "error", "error", "error", "error"]
    assert [record["status"] for record in records[1::2]] == expected


def test_seeds_of_the_run_and_of_rows(words: Workplace) -> None:
    """Rows without a seed take the run's; a row's answer is what it is alone, wherever it stands."""
    rows = [{"id": i, "prompt": f"row {i}", "n": 2, **({"seed": 5} if i % 3 == 0 else {})} for i in range(9)]
    together = answered(words, rows, temperature=1.0, max_tokens=9, seed=7, num_blocks=200)
    assert answered(words, rows[::-1], temperature=1.0, max_tokens=9, seed=7, restart=True)[::-1] == [
        {**record, "index": 8 - record["index"]} for record in together
    ]
    other = answered(words, rows, temperature=1.0, max_tokens=9, seed=8, restart=True)
    same = [a["outputs"] == b["outputs"] for a, b in zip(together, other, strict=True)]
    assert same == [i % 3 == 0 for i in range(9)]


def test_rows_with_one_id_and_sample_indices_of_their_own(words: Workplace) -> None:
    settings = {"temperature": 1.0, "max_tokens": 9, "allow_duplicate_ids": True}
    (whole,) = answered(words, [{"id": "x", "prompt": "hi", "n": 5}], **settings)
    apart = answered(
        words, [{"id": "x", "prompt": "hi", "sample_index": i} for i in range(5)], restart=True, **settings
    )
    assert [record["outputs"][0]["token_ids"] for record in apart] == [
        output["token_ids"] for output in whole["outputs"]
    ]


def test_the_models_defaults_and_their_sources(letters: Workplace, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for each in letters.model.iterdir():
        (model / each.name).write_bytes(each.read_bytes())
    config = json.loads((model / "generation_config.json").read_text())
    said = {"repetition_penalty": 1.5, "max_new_tokens": 3, "bad_words_ids": [[5]], "guidance_scale": 2.0}
    (model / "generation_config.json").write_text(json.dumps({**config, **said}))
    letters.model = model
    view = View()
    letters.write([{"prompt": "z"}, {"prompt": "a"}])
    letters.run(view, max_tokens=2)
    assert [record["outputs"][0]["text"] for record in letters.records()] == ["zz", "cf"]  # b, token 5, is banned
    settings = letters.stats["settings"]
    sources = {name: (settings[name]["value"], settings[name]["source"]) for name in (
        "repetition_penalty", "max_tokens", "bad_words", "top_k")}  # fmt: skip
    assert sources == {
        "repetition_penalty": (1.5, "model"),
        "max_tokens": (2, "command line"),
        "bad_words": ([[5]], "model"),
        "top_k": (0, "default"),
    }
    assert [notice for notice in view.notices if "generation_config" in notice] == [
        "the model's generation_config sets guidance_scale: left out, there is no such control"
    ]
    view = View()
    letters.run(view, max_tokens=2, generation_config="none", restart=True)
    assert [record["outputs"][0]["text"] for record in letters.records()] == ["zz", "b"]
    assert not any("generation_config" in notice for notice in view.notices)
    assert letters.stats["settings"]["repetition_penalty"] == {"value": 1.0, "source": "default"}
    assert letters.stats["settings"]["generation_config"]["source"] == "command line"


def test_more_samples_than_may_run_at_once(letters: Workplace) -> None:
    settings = {"max_tokens": 4, "temperature": 1.0, "num_blocks": 400}
    rows = [{"id": "t", "prompt": "t", "n": 300}]
    wide = answered(letters, rows, max_num_seqs=300, **settings)
    for max_num_seqs in (16, 1):
        assert answered(letters, rows, max_num_seqs=max_num_seqs, restart=True, **settings) == wide
        assert letters.stats["memory"]["peak_running_sequences"] == max_num_seqs

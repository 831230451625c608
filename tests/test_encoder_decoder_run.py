"""Jobs with a trained encoder-decoder: rows in, records out; what is read of a row, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM
from workplace import View, Workplace

#: "[31,10,19,13,5,7]", the source of the traps below: START is 52, EOS 53.
SOURCE = [31, 10, 19, 13, 5, 7]
BEAMS = {"num_beams": 3, "n": 3}


@pytest.fixture
def names(tmp_path: Path, aren_path: Path) -> Workplace:
    return Workplace(tmp_path, aren_path)


@pytest.fixture(scope="module")
def reference(aren_path: Path) -> list[Any]:
    """What CTranslate2 found: `src`, and `hyps`, the best first."""
    found: list[Any] = json.loads((aren_path / "beam5_reference.json").read_text())
    return found


def answered(place: Workplace, rows: list[dict[str, Any]], **settings: Any) -> list[Any]:
    place.write(rows)
    place.run(restart=True, **settings)
    return place.records()


def best(place: Workplace, row: dict[str, Any] | None = None, **settings: Any) -> tuple[list[int], float]:
    """Token ids and score of the first of three beams."""
    (record,) = answered(place, [{"prompt_token_ids": SOURCE, **BEAMS, **(row or {})}], **settings)
    assert record["error"] is None
    return record["outputs"][0]["token_ids"], record["outputs"][0]["score"]


def test_five_beams_equal_generate(names: Workplace, reference: list[Any]) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(names.model).eval()
    rows = [{"prompt": each["src"]} for each in reference]
    records = answered(names, rows, num_beams=5, n=5, length_penalty=0.0, num_blocks=400)
    from engines import tokenizer

    for record, each in zip(records, reference, strict=True):
        ids = torch.tensor([tokenizer(names.model)(each["src"])["input_ids"]])
        with torch.inference_mode():
            out = model.generate(
                ids,
                num_beams=5,
                num_return_sequences=5,
                length_penalty=0.0,
                max_length=60,
                output_scores=True,
                return_dict_in_generate=True,
            )
        expected = [[i for i in row.tolist()[1:] if i != 51] for row in out.sequences]
        assert [output["token_ids"] for output in record["outputs"]] == expected
        assert [output["score"] for output in record["outputs"]] == pytest.approx(
            out.sequences_scores.tolist(), abs=1e-4
        )
        assert record["outputs"][0]["text"].replace(" ", "") == each["hyps"][0]
        assert record["usage"]["prompt_tokens"] == ids.shape[1]


def test_lengths_and_penalties(names: Workplace) -> None:
    ids, score = best(names)
    assert (ids, score) == ([54, 62, 74, 64, 59, 58, 53], pytest.approx(-0.151678, abs=1e-5))
    _, score = best(names, {"length_penalty": 2.0, "early_stopping": True})
    assert score == pytest.approx(-0.021668, abs=1e-5)
    ids, score = best(names, {"max_tokens": 3})
    assert (ids, score) == ([54, 62, 74], pytest.approx(-0.075812, abs=1e-5))
    ids, score = best(names, {"max_tokens": 3, "forced_eos_token_id": 53})
    assert (ids, score) == ([54, 62, 53], pytest.approx(-0.057144, abs=1e-5))
    ids, score = best(names, {"min_tokens": 9, "max_tokens": 13})
    assert (len(ids), score) == (10, pytest.approx(-0.928893, abs=1e-5))
    ids, score = best(names, {"min_tokens": 10, "max_tokens": 13})
    assert (len(ids), score) == (11, pytest.approx(-1.294180, abs=1e-5))


def test_forced_beginnings_and_target_prefixes(names: Workplace) -> None:
    ids, score = best(names, {"forced_bos_token_id": 68})
    assert (ids[0], len(ids), score) == (68, 8, pytest.approx(-0.250129, abs=1e-5))
    ids, score = best(names, {"decoder_prompt": [68]})
    assert (len(ids), score) == (7, pytest.approx(-0.285862, abs=1e-5))
    assert best(names, {"decoder_prompt": [68], "forced_bos_token_id": 54}) == (ids, score)  # not behind a prefix
    as_text, _ = best(names, {"decoder_prompt": "k"})
    assert as_text == ids


def test_a_given_translation_is_scored(names: Workplace) -> None:
    target = [54, 62, 74, 64, 59, 58, 53]
    row = {"prompt_token_ids": SOURCE, "decoder_prompt": target, "max_tokens": 0, "prompt_logprobs": 0}
    (record,) = answered(names, [row])
    logprobs = [entry["logprob"] for entry in record["prompt_logprobs"][1:]]
    assert len(logprobs) == len(target)
    assert sum(logprobs) / 7 == pytest.approx(-0.151678, abs=1e-5)


def test_outputs_that_repeat_themselves_are_marked(names: Workplace) -> None:
    rows = [{"prompt_token_ids": SOURCE, "allowed_token_ids": [68], "max_tokens": 20}, {"prompt_token_ids": SOURCE}]
    loop, other = answered(names, rows)
    assert loop["outputs"][0]["repeated_tokens"] == 19
    assert "repeated_tokens" not in other["outputs"][0]


def test_a_limit_relative_to_the_source(names: Workplace) -> None:
    rows = [{"prompt_token_ids": SOURCE, "max_tokens_per_source_token": limit} for limit in (0.5, 0.4, 2.0)]
    assert [len(record["outputs"][0]["token_ids"]) for record in answered(names, rows)] == [3, 3, 7]


def test_rows_that_can_not_be_answered(names: Workplace) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": ""},
        {"prompt_token_ids": []},
        {"prompt": "كان" * 60},
        {"messages": [{"role": "user", "content": "كان"}]},
        {"prompt": "كان", "target_lang": "fr"},
        {"prompt": "كان", "decoder_prompt": 5},
        {"prompt_token_ids": SOURCE, "num_beams": 60, "max_tokens": 100},
        {"prompt": "كان", "decoder_prompt": [-1]},
        {"prompt_token_ids": [94]},
        {"prompt": "كان"},
        {"prompt_token_ids": [53]},
        {"prompt": "كان" * 60, "truncate_prompt": "right"},
    ]
    records = answered(names, rows, num_blocks=60)
    errors = [record["error"] for record in records]
    assert [error is None for error in errors] == [False] * 9 + [True] * 3
    for error, words in zip(
        errors,
        (
            "the source is empty: its text has no token",
            "the source is empty: it has no token",
            "the source has 180 tokens, and the model's limit is 128",
            "messages: this model is an encoder-decoder, which has no chat",
            "target_lang 'fr': this model's tokenizer has no target languages",
            "decoder_prompt must be text or a list of token ids",
            "(source 6 + prompt 1 + max_tokens 100, 60 beams), but the pool has 60",
            "decoder_prompt: -1 is no token id of this model, whose vocabulary has 94",
            "prompt_token_ids: 94 is no token id of this model, whose vocabulary has 94",
        ),
        strict=False,
    ):
        assert words in error
    assert records[-1]["usage"]["truncated_tokens"] == 180 - 128


def test_one_block_fewer_than_a_source_and_its_beams_need(names: Workplace) -> None:
    rows = [{"prompt_token_ids": SOURCE, "num_beams": 5, "max_tokens": 16}]
    assert answered(names, rows, num_blocks=6)[0]["error"] is None
    error = answered(names, rows, num_blocks=5)[0]["error"]
    assert "needs 6 KV blocks" in error
    assert "the pool has 5" in error


def test_equal_sources_are_encoded_once(names: Workplace, reference: list[Any]) -> None:
    rows = [{"prompt": each["src"]} for each in reference[:40]] * 4
    answered(names, rows, num_beams=2, num_blocks=2000)
    cache = names.stats["memory"]["prefix_cache"]
    assert cache["queried_tokens"] == 4 * cache["hit_tokens"] / 3


def test_sharing_counts_a_source_for_each_reader(names: Workplace) -> None:
    """60 tokens are 4 blocks, which five beams read; each has at most one block of its own."""
    rows = [{"prompt_token_ids": (SOURCE * 10), "num_beams": 5, "max_tokens": 14}]
    answered(names, rows)
    memory = names.stats["memory"]
    assert memory["peak_live_blocks"] == 4 + 5
    # The first step has one beam, which shares nothing; after it, 25 blocks would be held, and 9 are.
    assert 0.5 < memory["sharing_saving"] < 1 - 9 / 25


def test_a_run_that_was_interrupted_is_resumed(names: Workplace, reference: list[Any]) -> None:
    rows = [{"id": str(i), "prompt": each["src"], "num_beams": 1 + i % 3} for i, each in enumerate(reference[:60])]
    whole = answered(names, rows)
    names.output.unlink()

    sent: list[int] = []

    def interrupt(rows_done: int) -> None:
        if rows_done >= 20 and not sent:
            sent.append(rows_done)
            os.kill(os.getpid(), signal.SIGINT)

    names.write(rows)
    view = View(interrupt)
    assert names.run(view, max_num_seqs=4).exit_code == 130
    assert names.journal.exists()
    assert names.run(max_num_seqs=4).exit_code == 0
    resumed = names.records()
    for one, other in zip(resumed, whole, strict=True):
        assert [each["token_ids"] for each in one["outputs"]] == [each["token_ids"] for each in other["outputs"]]

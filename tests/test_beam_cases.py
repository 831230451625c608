"""Beam search as people meet it: exhaustive, very wide, among other rows, and asked for what can't be."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import hf_beams, hf_model, run_engine, tokenizer

from pagedbatch.cli.app import main
from pagedbatch.output.records import RecordWriter
from pagedbatch.outputs import CompletionOutput
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

A, B, C, D = 50, 60, 70, 80
EOS, EOT = 2, 3


def run_one(path: Path, prompt: str | list[int], **params: Any) -> list[CompletionOutput]:
    ids = tokenizer(path)(prompt).input_ids if isinstance(prompt, str) else prompt
    num_blocks = max(2000, 3 * params["num_beams"])
    run = run_engine(
        path, [Request(0, ids, GenerationParams(**params))], num_blocks=num_blocks, max_num_seqs=params["num_beams"]
    )
    return run.outputs[0].outputs


def texts(path: Path, outputs: list[CompletionOutput]) -> list[str]:
    return [tokenizer(path).decode(output.token_ids, skip_special_tokens=True) for output in outputs]


# --- exhaustive ------------------------------------------------------------------------------------------------------


def every_output(
    path: Path, prompt: list[int], allowed: tuple[int, ...], max_tokens: int
) -> dict[tuple[int, ...], float]:
    """Each output that is possible with these tokens, and its summed logprob."""
    complete: dict[tuple[int, ...], float] = {}
    live: dict[tuple[int, ...], float] = {(): 0.0}
    for length in range(1, max_tokens + 1):
        batch = torch.tensor([[*prompt, *ids] for ids in live])
        with torch.inference_mode():
            logprobs = hf_model(path)(batch).logits[:, -1].double().log_softmax(-1)
        grown = {
            (*ids, token_id): score + float(row[token_id])
            for (ids, score), row in zip(live.items(), logprobs, strict=True)
            for token_id in allowed
        }
        ends = {ids: score for ids, score in grown.items() if ids[-1] in (EOS, EOT) or length == max_tokens}
        complete |= ends
        live = {ids: score for ids, score in grown.items() if ids not in ends}
    return complete


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_beams_as_wide_as_the_tree_find_everything_in_order(rand_model_path: Path, length_penalty: float) -> None:
    prompt, allowed = [1, 90, 91], (A, B, C, D, EOS, EOT)
    everything = every_output(rand_model_path, prompt, allowed, max_tokens=4)
    expected = sorted(
        ((score / len(ids) ** length_penalty, list(ids)) for ids, score in everything.items()), reverse=True
    )
    assert len(expected) == sum(2 * 4**depth for depth in range(3)) + 6 * 4**3
    outputs = run_one(
        rand_model_path,
        prompt,
        num_beams=len(expected),
        n=len(expected),
        max_tokens=4,
        allowed_token_ids=allowed,
        length_penalty=length_penalty,
        early_stopping="never",
    )
    assert [output.token_ids for output in outputs] == [ids for _, ids in expected]
    assert [output.score for output in outputs] == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_wide_beams_find_the_best_of_all_texts(table_model_path: Path) -> None:
    """T has 64 tokens, but all that is likely is written with ten of them; the tail beyond has equal scores."""
    ids = tokenizer(table_model_path)
    everything = every_output(table_model_path, ids("a").input_ids, (*ids("bcdefgh").input_ids, EOS, EOT), max_tokens=5)
    best = sorted(((score / len(found), list(found)) for found, score in everything.items()), reverse=True)[:14]
    outputs = run_one(table_model_path, "a", num_beams=512, n=14, max_tokens=5, early_stopping="never")
    assert [output.token_ids for output in outputs] == [found for _, found in best]
    assert [output.score for output in outputs] == pytest.approx([score for score, _ in best], abs=1e-4)


def test_512_beams_equal_hf(rand_model_path: Path) -> None:
    params = GenerationParams(num_beams=512, n=512, max_tokens=8)
    prompt = [1, 100, 101, 102]
    expected = hf_beams(rand_model_path, prompt, params)
    outputs = run_one(rand_model_path, prompt, num_beams=512, n=512, max_tokens=8)
    assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], abs=1e-4)
    # Scores lie so close that rounding may swap neighbours, not more.
    assert {tuple(output.token_ids) for output in outputs[:500]} <= {tuple(token_ids) for token_ids, _ in expected}
    assert [output.token_ids for output in outputs[:20]] == [token_ids for token_ids, _ in expected[:20]]


# --- how many come back, and what they hold --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_any_number_of_beams_may_be_returned(table_model_path: Path, n: int) -> None:
    outputs = run_one(table_model_path, "a", num_beams=4, n=n, max_tokens=8)
    assert texts(table_model_path, outputs) == ["cfgh", "bdefgh", "befgh", "b"][:n]


def test_the_beams_of_one_real_path_are_distinct(table_model_path: Path) -> None:
    outputs = run_one(table_model_path, "p", num_beams=2, n=2, max_tokens=5)
    assert texts(table_model_path, outputs)[0] == "qr"
    assert outputs[0].token_ids != outputs[1].token_ids
    assert outputs[1].cumulative_logprob < -10


def test_fewer_come_back_where_fewer_are_possible(table_model_path: Path) -> None:
    ids = tokenizer(table_model_path)
    outputs = run_one(
        table_model_path, "p", num_beams=4, n=4, max_tokens=2, allowed_token_ids=(*ids("q").input_ids, EOS)
    )
    assert sorted(texts(table_model_path, outputs)) == ["", "q", "qq"]


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(("model", "prompt"), [("table_model_path", "a"), ("rand_model_path", "hi")])
def test_text_is_what_was_generated_without_special_tokens(
    request: pytest.FixtureRequest, model: str, prompt: str, num_beams: int
) -> None:
    path = request.getfixturevalue(model)
    writer = RecordWriter(tokenizer(path))
    for skips in (True, False):
        params = GenerationParams(num_beams=num_beams, n=num_beams, max_tokens=10, skip_special_tokens=skips)
        row = Request(0, tokenizer(path)(prompt).input_ids, params)
        output = run_engine(path, [row]).outputs[0]
        for completion, written in zip(output.outputs, writer.ok_record(None, output, row)["outputs"], strict=True):
            text = written["text"]
            assert written["token_ids"] == completion.token_ids
            assert text == tokenizer(path).decode(completion.token_ids, skip_special_tokens=skips)
            assert not text.startswith(prompt)
            ended = completion.token_ids[-1] == EOS
            assert text.endswith("<eos>") == (ended and not skips)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--n", "3", "--num-beams", "2"], "n 3 is above num_beams 2"),
        (["--num-beams", "4", "--num-beam-groups", "3"], "num_beams 4 can't be split"),
        (["--num-beams", "4", "--temperature", "0.7"], "beams don't sample"),
    ],
)
def test_what_beams_cannot_do_is_refused_before_the_model_loads(
    table_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    words: str,
) -> None:
    model = tmp_path / "no_weights"
    shutil.copytree(table_model_path, model, ignore=shutil.ignore_patterns("*.safetensors"))
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "a"}\n', encoding="utf-8")
    command = ["pagedbatch", "run", str(rows), "--model", str(model), "--output", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr("sys.argv", [*command, *settings])
    with pytest.raises(SystemExit) as refusal:
        main()
    assert refusal.value.code == 2
    assert words in capsys.readouterr().err


# --- logprobs and controls -------------------------------------------------------------------------------------------

CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"no_repeat_ngram_size": 2, "min_tokens": 4},
    {"logit_bias": ((9, 2.0), (40, -3.0))},
    {"stop": ("e",), "stop_token_ids": (77,)},
]


@pytest.mark.parametrize("controls", CONTROLS, ids=lambda controls: "-".join(controls))
def test_scores_are_the_sums_of_the_token_logprobs(rand_model_path: Path, controls: dict[str, Any]) -> None:
    """Those that the search ranked by, after every control; the most likely tokens beside them are the model's own."""
    prompt = [1, 60, 61, 62]
    outputs = run_one(
        rand_model_path, prompt, num_beams=4, n=4, max_tokens=10, logprobs=2, length_penalty=0.6, **controls
    )
    for output in outputs:
        assert sum(output.token_logprobs) == pytest.approx(output.cumulative_logprob, abs=1e-4)
        assert output.score == pytest.approx(output.cumulative_logprob / len(output.token_ids) ** 0.6, abs=1e-6)
        with torch.inference_mode():
            logits = hf_model(rand_model_path)(torch.tensor([prompt + output.token_ids])).logits[
                0, len(prompt) - 1 : -1
            ]
        best = logits.log_softmax(-1).topk(2)
        assert output.top_logprobs is not None
        for top, values, ids in zip(output.top_logprobs, best.values.tolist(), best.indices.tolist(), strict=True):
            assert [token_id for token_id, _ in top] == ids
            assert [logprob for _, logprob in top] == pytest.approx(values, abs=1e-4)


# --- batch mates -----------------------------------------------------------------------------------------------------


def rows_of(path: Path, kind: str) -> list[Request]:
    rng = random.Random(4)
    if kind == "table":
        prompts = [tokenizer(path)(rng.choice("abcmpt")).input_ids for _ in range(40)]
    else:
        prompts = [[1] + [rng.randrange(4, 256) for _ in range(rng.randrange(1, 40))] for _ in range(40)]
    widths = itertools.cycle((2, 3, 3, 1))
    params = (GenerationParams(num_beams=width, n=width, max_tokens=10) for width in widths)
    return [Request(i, ids, each) for i, (ids, each) in enumerate(zip(prompts, params, strict=False))]


@pytest.mark.parametrize(("model", "kind"), [("table_model_path", "table"), ("rand_model_path", "rand")])
def test_a_rows_beams_do_not_depend_on_its_batch(request: pytest.FixtureRequest, model: str, kind: str) -> None:
    path = request.getfixturevalue(model)
    rows = rows_of(path, kind)
    alone = run_engine(path, rows, max_num_seqs=1)
    shuffled = rows[:]
    random.Random(5).shuffle(shuffled)
    for max_num_seqs, num_blocks in ((7, 2000), (64, 2000), (64, 12)):
        for order in (rows, shuffled):
            run = run_engine(path, order, max_num_seqs=max_num_seqs, num_blocks=num_blocks)
            assert run.token_ids() == alone.token_ids()
            for i, result in run.outputs.items():
                expected = [output.cumulative_logprob for output in alone.outputs[i].outputs]
                assert [output.cumulative_logprob for output in result.outputs] == pytest.approx(expected, abs=1e-4)

"""Vocabularies that are padded behind the tokenizer's last token: such ids are never chosen, listed or taken."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import rand_model
from safetensors.torch import load_file, save_file
from workplace import Workplace

from pagedbatch.model.model_defaults import model_defaults, num_token_ids
from pagedbatch.model.sampler import Sampler
from pagedbatch.model.tokenizer import load_tokenizer
from pagedbatch.params import GenerationParams
from pagedbatch.step import BeamTask, SampleTask, SchedulerOutput

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def padded_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that likes ids without a token best."""
    path = tmp_path_factory.mktemp("padded")
    rand_model(path)
    weights = load_file(path / "model.safetensors")
    tail = len(load_tokenizer(str(path)))
    assert tail < len(weights["lm_head.weight"])
    weights["lm_head.weight"][tail:] = 6 * weights["lm_head.weight"][4 : 4 + len(weights["lm_head.weight"]) - tail]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def test_no_output_holds_an_id_without_a_token(tmp_path: Path, padded_model_path: Path) -> None:
    work = Workplace(tmp_path, padded_model_path)
    last = len(load_tokenizer(str(padded_model_path))) - 1
    controls: list[dict[str, Any]] = [{}, {"n": 8, "temperature": 2.0}, {"num_beams": 4, "n": 4}]
    controls += [each | {"logprobs": 5, "prompt_logprobs": 5, "repetition_penalty": 1.1} for each in controls]
    controls += [each | {"logprobs_mode": "processed"} for each in controls[3:]]
    work.write([{"prompt": "some words", **each} for each in controls])
    assert work.run(max_tokens=12).exit_code == 0
    seen, total = set(), 0.0
    for record in work.records():
        for output in record["outputs"]:
            seen.update(output["token_ids"])
            for entry in output["logprobs"] or []:
                seen.update(top["token_id"] for top in entry["top_logprobs"])
        for entry in (record.get("prompt_logprobs") or [])[1:]:
            seen.update(top["token_id"] for top in entry["top_logprobs"])
            total = max(total, sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]))
    assert max(seen) <= last
    assert total < 0.9, "logprobs are the model's own: what it gives to ids without a token is not shared out"


def test_a_catalog_of_ids_without_a_token_is_an_error(tmp_path: Path, padded_model_path: Path) -> None:
    work = Workplace(tmp_path, padded_model_path)
    size = len(load_tokenizer(str(padded_model_path)))
    work.write([{"prompt": "a", "allowed_outputs": [[5], [size]]}])
    assert work.run(max_tokens=2).exit_code == 3
    expected = f"allowed_outputs[1]: {size} is no token id of this model, whose last one is {size - 1}"
    assert work.records()[0]["error"] == f"line 1: {expected}"


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_token_ids"])
def test_a_row_that_names_an_id_without_a_token_is_an_error(tmp_path: Path, padded_model_path: Path, name: str) -> None:
    work = Workplace(tmp_path, padded_model_path)
    size = len(load_tokenizer(str(padded_model_path)))
    values = {"logit_bias": {str(size): 1.0}, "bad_words": [[5, size]]}
    row = {"prompt_token_ids": [5, 6], name: values.get(name, [size])}
    work.write([row, {"prompt": "a"}])
    assert work.run(max_tokens=2).exit_code == 3
    bad, good = work.records()
    expected = (
        f"{name}: {size} is no token of this model's tokenizer, whose last one is {size - 1}: ids above it are padding"
    )
    assert bad["error"] == f"line 1: {expected}"
    assert good["status"] == "ok"


def test_samples_and_beams_choose_among_tokens_alone() -> None:
    logits = torch.arange(10.0).repeat(3, 1)
    raw = logits.log_softmax(dim=-1)
    greedy = SampleTask(0, GenerationParams(logprobs=2), 0, (0,), 0)
    beams = BeamTask(range(1, 3), GenerationParams(num_beams=2, logprobs=2), [0.0, -1.0], 4, 1)
    step = SchedulerOutput(0, [], [greedy], [beams], [], [], [], 0)
    (sample,), (ranked,) = Sampler(frozenset({2}), num_token_ids=NUM_TOKENS)(logits, step)
    assert sample.token_ids == [5]
    assert sample.logprobs == pytest.approx([raw[0, 5].item()])
    assert sample.top_logprobs == [[(5, pytest.approx(raw[0, 5].item())), (4, pytest.approx(raw[0, 4].item()))]]
    assert ranked.token_ids == [5, 4, 5, 3]


@pytest.mark.parametrize(
    ("vocabulary", "eos", "vocab_size", "expected"),
    [
        ({"a": 0, "b": 1}, set(), 8, 2),
        ({"a": 0, "added": 6}, set(), 8, 7),  # ids in between are holes
        ({"a": 0}, {5}, 8, 6),  # an end token that the tokenizer lacks must stay possible
        ({"a": 0}, {9}, 8, 1),  # one past the vocabulary can't come
        ({"a": 0, "b": 9}, set(), 8, 8),
    ],
)
def test_the_number_of_ids(vocabulary: dict[str, int], eos: set[int], vocab_size: int, expected: int) -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)
    defaults: Any = SimpleNamespace(eos_token_ids=frozenset(eos), config=SimpleNamespace(vocab_size=vocab_size))
    assert num_token_ids(tokenizer, defaults) == expected


def test_the_number_of_ids_of_a_fixture(rand_model_path: Path) -> None:
    tokenizer, defaults = load_tokenizer(str(rand_model_path)), model_defaults(str(rand_model_path))
    assert num_token_ids(tokenizer, defaults) == len(tokenizer) < defaults.config.vocab_size

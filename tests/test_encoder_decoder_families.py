"""Every supported family of encoder-decoders against Hugging Face's `generate` on the same random weights, in float32.

docs/models.md lists these families.
"""

from __future__ import annotations

from typing import Any

import pytest
from encoder_decoder_families import FAMILIES, SOURCES, generate, request, run

from pagedbatch.model.model_config import ENCODER_DECODER_MODEL_TYPES
from pagedbatch.outputs import RequestOutput

FAMILY = pytest.mark.parametrize("family", sorted(FAMILIES))
#: What generation_config.json may say, as `generate` and the job read it.
GENERATION: dict[str, dict[str, Any]] = {
    "plain": {"max_length": 20},
    "short": {"max_length": 6, "forced_eos_token_id": 1},
    "forced bos": {"max_length": 14, "forced_bos_token_id": 68},
    "minimum": {"max_length": 14, "min_length": 10, "forced_eos_token_id": 1},
    "new tokens": {"max_new_tokens": 13, "min_new_tokens": 10},
    "penalties": {"max_length": 20, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[0], [5]]},
}
BEAMS: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "4 beams": {"num_beams": 4, "num_return_sequences": 4},
    "length 2, early": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0, "early_stopping": True},
    "length 0": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.0},
}


def assert_as_generate(family: str, output: RequestOutput, source: list[int], settings: dict[str, Any]) -> None:
    assert output.error is None
    expected = generate(family, source, **settings)
    assert [each.token_ids for each in output.outputs] == [token_ids for token_ids, _ in expected]
    if expected[0][1] is not None:
        assert [each.score for each in output.outputs] == pytest.approx(
            [score for _, score in expected], abs=1e-4, rel=1e-4
        )


def asked(beams: dict[str, Any]) -> dict[str, Any]:
    return {{"num_return_sequences": "n"}.get(name, name): value for name, value in beams.items()}


@FAMILY
@pytest.mark.parametrize("forward", ["fused", "hf"])
@pytest.mark.parametrize("generation", GENERATION)
def test_generation_configs(family: str, generation: str, forward: str) -> None:
    beams = BEAMS["4 beams"]
    rows = [request(i, source, GENERATION[generation], **asked(beams)) for i, source in enumerate(SOURCES)]
    outputs, _ = run(family, rows, forward="hf" if forward == "hf" else "auto")
    for i, source in enumerate(SOURCES):
        assert_as_generate(family, outputs[i], source, GENERATION[generation] | beams)


@FAMILY
@pytest.mark.parametrize("beams", BEAMS)
def test_searches(family: str, beams: str) -> None:
    rows = [request(i, source, GENERATION["plain"], **asked(BEAMS[beams])) for i, source in enumerate(SOURCES)]
    outputs, _ = run(family, rows)
    for i, source in enumerate(SOURCES):
        assert_as_generate(family, outputs[i], source, GENERATION["plain"] | BEAMS[beams])


#: Ways to run that must not change a result.
SCHEDULES: dict[str, dict[str, Any]] = {
    "swap": {"num_blocks": 18, "num_swap_blocks": 100, "preemption": "swap", "block_size": 8},
    "recompute": {"num_blocks": 18, "preemption": "recompute", "block_size": 8},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 7},
    "blocks of 32, no prefix cache": {"block_size": 32, "prefix_cache": False, "num_blocks": 40},
    "torch": {"attention": "torch"},
}


@FAMILY
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_changes_a_result(family: str, schedule: str) -> None:
    """Beams, diverse beams, samples and greedy rows beside each other; equal sources too."""
    ways: list[dict[str, Any]] = [
        {"num_beams": 4, "n": 4},
        {"num_beams": 4, "n": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"n": 4, "temperature": 1.0},
        {},
    ]
    rows = [
        request(number, source, GENERATION["plain"], **way)
        for number, (way, source) in enumerate((way, source) for way in 3 * ways for source in SOURCES)
    ]
    calm, _ = run(family, rows, num_blocks=2000)
    found, engine = run(family, rows, **SCHEDULES[schedule])
    counters = engine.scheduler.counters
    if schedule in ("swap", "recompute"):
        assert counters.preemptions_swap + counters.preemptions_recompute >= 5
    for number, output in calm.items():
        assert found[number].error is None
        same = [each.token_ids for each in output.outputs]
        assert [each.token_ids for each in found[number].outputs] == same, (number, schedule)


def test_every_supported_family_is_tested() -> None:
    assert set(FAMILIES) == ENCODER_DECODER_MODEL_TYPES

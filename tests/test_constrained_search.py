"""Catalogs inside the engine: beams, samples and greedy rows on models, and what must not change them."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from constrained_runs import (
    Item,
    assert_same_ranking,
    beginnings,
    catalog,
    encode,
    ends_of,
    exhaustive,
    ranked,
    run_one,
)
from engines import hf_beams, run_engine
from fake_runs import EOS as FAKE_EOS
from fake_runs import FakeRun, fake_run
from fake_runs import request as fake_request
from models import EOS, code_model

from pagedbatch.constraints.catalog import CatalogConstraint, TokenTrie, pack
from pagedbatch.engine.engine import NO_OUTPUT
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

# --- catalogs: beams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_on_the_table_model(table_model_path: Path, length_penalty: float) -> None:
    """`b` begins two other items, and `zz` begins none that is likely."""
    texts = ["b", "bd", "bdefgh", "cfgh", "zz", "b"]
    params = GenerationParams(num_beams=8, n=8, max_tokens=8, length_penalty=length_penalty)
    prompt = encode(table_model_path, "a")
    items = [encode(table_model_path, text) for text in texts]
    run = run_one(table_model_path, prompt, params, items)
    sums = exhaustive(table_model_path, prompt, [(*item, EOS) for item in set(items)])
    assert_same_ranking(run.outputs[0].outputs, ranked(sums, length_penalty))


def test_all_end_tokens_close_an_item(rand_model_path: Path) -> None:
    items = [encode(rand_model_path, text) for text in ("yes", "no", "nobody", "é中😀")]
    params = GenerationParams(num_beams=20, n=20, max_tokens=40)
    prompt = [1, *encode(rand_model_path, "is it?")]
    run = run_one(rand_model_path, prompt, params, items)
    whole = [(*item, end) for item in items for end in ends_of(rand_model_path)]
    assert_same_ranking(run.outputs[0].outputs, ranked(exhaustive(rand_model_path, prompt, whole), 1.0))
    assert {output.finish_reason for output in run.outputs[0].outputs} == {"stop"}


def random_items(count: int, seed: int) -> list[Item]:
    rng = random.Random(seed)
    return [tuple(rng.choices(range(4, 30), k=rng.randrange(1, 5))) for _ in range(count)]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("num_beams", [2, 4, 9])
def test_beams_equal_hf_with_the_same_prefix_function(
    rand_model_path: Path, num_beams: int, early_stopping: bool | str
) -> None:
    """Hugging Face masks after its log-softmax too, and goes by a tree of dictionaries here."""
    ends = sorted(ends_of(rand_model_path))
    for seed in range(6):
        items = random_items(150, seed)
        tree: dict[int, Any] = {}
        for item in items:
            node = tree
            for token_id in item:
                node = node.setdefault(token_id, {})
            node |= {end: {} for end in ends}
        prompt = [1, *range(40 + seed, 52 + seed)]

        def next_tokens(_: int, sent: torch.Tensor, tree: Any = tree, skip: int = len(prompt)) -> list[int]:
            for token_id in sent.tolist()[skip:]:
                tree = tree.get(token_id, {})
            return list(tree) or ends[:1]  # a finished row is padded

        params = GenerationParams(
            num_beams=num_beams, n=num_beams, max_tokens=7, length_penalty=0.6, early_stopping=early_stopping
        )
        run = run_one(rand_model_path, prompt, params, items)
        expected = hf_beams(rand_model_path, prompt, params, prefix_allowed_tokens_fn=next_tokens)
        assert_same_ranking(run.outputs[0].outputs, [(tuple(ids), score) for ids, score in expected])


# --- catalogs: semantic ids of a recommender -------------------------------------------------------------------------


@cache
def code_model_path(folder: Path, codes: tuple[str, ...]) -> Path:
    code_model(folder / "model", codes)
    return folder / "model"


@pytest.mark.parametrize("name", ["Industrial_and_Scientific", "Office_Products"])
def test_a_catalog_of_semantic_ids(genrec_path: Path, tmp_path: Path, name: str) -> None:
    """Some items share their codes. Beams as many as items rank the whole catalog; 50 do what is left when, from the
    same exhaustive scores, the best 50 beginnings of each length are kept."""
    index: dict[str, list[str]] = json.loads((genrec_path / f"{name}.index.json").read_text())
    assert len({tuple(codes) for codes in index.values()}) < len(index)
    path = code_model_path(tmp_path, tuple(sorted({code for codes in index.values() for code in codes})))
    items = [encode(path, "".join(codes)) for codes in index.values()]
    assert {len(item) for item in items} == {3}
    prompt = [1, *items[5], *items[77], *items[1234]]
    sums = beginnings(path, prompt, [(*item, EOS) for item in set(items)])
    everything = ranked({output: total for output, total in sums.items() if len(output) == 4}, 1.0)
    scores = dict(everything)

    wide = GenerationParams(num_beams=len(everything), n=len(everything), max_tokens=8)
    found = run_one(path, prompt, wide, items).outputs[0].outputs
    assert {tuple(output.token_ids) for output in found} == scores.keys()
    assert [output.score for output in found] == pytest.approx([score for _, score in everything], abs=1e-4)

    kept: set[Item] = {()}
    for length in range(1, 5):
        longer = {output: total for output, total in sums.items() if len(output) == length and output[:-1] in kept}
        kept = {output for output, _ in ranked(longer, 0.0)[:50]}
    beams = run_one(path, prompt, replace(wide, num_beams=50, n=50), items).outputs[0].outputs
    assert_same_ranking(beams, [(output, score) for output, score in everything if output in kept])
    assert len({tuple(output.token_ids) for output in beams}) == 50


# --- catalogs: samples, greedy rows, dead ends -----------------------------------------------------------------------


def test_samples_follow_the_odds_of_what_is_allowed(table_model_path: Path) -> None:
    """After `t` come u, v, w and x alike. Two of them are left, and logprobs stay the model's own."""
    items = [encode(table_model_path, text) for text in "uv"]
    params = GenerationParams(n=400, temperature=1.0, max_tokens=3)
    outputs = run_one(table_model_path, encode(table_model_path, "t"), params, items).outputs[0].outputs
    assert {tuple(output.token_ids) for output in outputs} == {(*item, EOS) for item in items}
    assert 160 < sum(output.token_ids[0] == items[0][0] for output in outputs) < 240
    assert outputs[0].token_logprobs[0] == pytest.approx(math.log(0.25), abs=1e-3)


def test_a_filter_looks_at_what_is_allowed_only(table_model_path: Path) -> None:
    """`top_k` 1 takes the likeliest of the allowed ones: were it looked for among all, nothing would be left."""
    params = GenerationParams(temperature=1.0, top_k=1, max_tokens=4)
    for texts, expected in ((["zz", "c"], "c"), (["zz", "zb"], "zz")):
        items = [encode(table_model_path, text) for text in texts]
        output = run_one(table_model_path, encode(table_model_path, "a"), params, items).outputs[0].outputs[0]
        assert tuple(output.token_ids[:-1]) == encode(table_model_path, expected)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_no_other_letter_comes(table_model_path: Path, num_beams: int) -> None:
    """Case 10: one rule in all modes, before ranking. b would come first."""
    letters = "cfgh"
    items = [
        encode(table_model_path, "".join(word)) for k in (1, 2, 3, 4) for word in itertools.product(letters, repeat=k)
    ]
    params = GenerationParams(num_beams=num_beams, n=num_beams, max_tokens=6)
    outputs = run_one(table_model_path, encode(table_model_path, "a"), params, items).outputs[0].outputs
    assert len(outputs) == num_beams
    assert tuple(outputs[0].token_ids) == (*encode(table_model_path, "cfgh"), EOS)
    assert {i for output in outputs for i in output.token_ids} <= {*encode(table_model_path, letters), EOS}


def test_fewer_outputs_than_beams_and_none(table_model_path: Path) -> None:
    """Two of the three items need `f`, which may not come; without the third nothing is left."""
    prompt, bad = encode(table_model_path, "a"), (encode(table_model_path, "f"),)
    items = [encode(table_model_path, text) for text in ("cf", "bef", "bd")]
    for params in (
        GenerationParams(num_beams=4, n=4, max_tokens=8, bad_words=bad),
        GenerationParams(n=12, temperature=1.0, max_tokens=8, bad_words=bad),
    ):
        outputs = run_one(table_model_path, prompt, params, items).outputs[0].outputs
        assert 0 < len(outputs) < params.n
        assert {tuple(output.token_ids) for output in outputs} == {(*items[2], EOS)}
        failed = run_one(table_model_path, prompt, params, items[:2]).outputs[0]
        assert (failed.outputs, failed.error) == ([], NO_OUTPUT)


@pytest.mark.parametrize("num_beams", [1, 6])
def test_limits_choose_the_items_that_fit(table_model_path: Path, num_beams: int) -> None:
    items = [encode(table_model_path, text) for text in ("b", "cf", "bde", "cfgh", "bdefgh")]
    params = GenerationParams(num_beams=num_beams, n=num_beams, min_tokens=3, max_tokens=5)
    outputs = run_one(table_model_path, encode(table_model_path, "a"), params, items).outputs[0].outputs
    expected = {(*item, EOS) for item in items if 3 <= len(item) <= 4}
    found = {tuple(output.token_ids) for output in outputs}
    assert found == expected if num_beams > 1 else found < expected
    assert {output.finish_reason for output in outputs} == {"stop"}


# --- preemption, waves, batches --------------------------------------------------------------------------------------


def fake_constrained_requests() -> list[Request]:
    """Beams, samples and greedy rows over a catalog of random items, beside rows without a constraint."""
    rng = random.Random(3)
    items = [tuple(rng.choices(range(1, 11), k=rng.randrange(4, 14))) for _ in range(400)]
    kinds: list[dict[str, Any]] = [{"num_beams": 5, "n": 5}, {"n": 6}, {}, {"num_beams": 3, "n": 2}]
    requests = []
    for row in range(20):
        made = fake_request(row, 6 + row % 5, max_tokens=16, **kinds[row % 4])
        constraint = catalog(items, made.params, [FAKE_EOS]) if row % 5 else None
        requests.append(replace(made, constraint=constraint))
    return requests


def assert_only_items(run: FakeRun, requests: list[Request]) -> None:
    for request in requests:
        if request.constraint is not None:
            for output in run.outputs[request.request_id].outputs:
                state = request.constraint.start()
                for token_id in output.token_ids:
                    assert token_id in state.allowed().token_ids  # type: ignore[union-attr]
                    if token_id != FAKE_EOS:
                        state.advance(token_id)
                assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 36, "preemption": "recompute"},
        {"num_blocks": 36, "preemption": "swap", "num_swap_blocks": 200},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 7},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_constrained_outputs_do_not_depend_on_how_they_are_scheduled(settings: dict[str, Any]) -> None:
    requests = fake_constrained_requests()
    roomy = fake_run(requests)
    assert_only_items(roomy, requests)
    tight = fake_run(requests, **settings)
    preempted = tight.counters.preemptions_recompute + tight.counters.preemptions_swap
    assert preempted > 5 or "num_blocks" not in settings
    assert tight.answers() == roomy.answers()


def test_a_step_advances_each_state_once_and_forks_only_for_siblings() -> None:
    """A beam step costs one advance a survivor, whatever the length, and one fork for each child beyond the first."""
    calls = {"advance": 0, "fork": 0, "allowed": 0}

    class Counting:
        """Allows everything but the end, and counts."""

        max_tokens = None

        def __init__(self) -> None:
            self.length = 0

        def allowed(self) -> Any:
            calls["allowed"] += 1
            return everything.start().allowed()

        def advance(self, token_id: int) -> None:
            calls["advance"] += 1
            self.length += 1

        def fork(self) -> Counting:
            calls["fork"] += 1
            child = Counting()
            child.length = self.length
            return child

        def start(self) -> Counting:
            return Counting()

    everything = CatalogConstraint(TokenTrie.build(pack([i]) for i in range(1, 11)), (FAKE_EOS,), 0, 9)
    made = fake_request(0, 6, num_beams=4, n=4, max_tokens=40)
    run = fake_run([replace(made, constraint=Counting())])
    num_steps = len([step for step in run.steps if step.beams])
    assert num_steps == 40
    assert calls["advance"] == 4 * (num_steps - 1)
    assert calls["allowed"] == 1 + 4 * (num_steps - 1)
    assert calls["fork"] < calls["advance"]


def test_preemption_on_a_model_changes_nothing(rand_model_path: Path) -> None:
    rng = random.Random(1)
    items = [tuple(rng.choices(range(4, 40), k=rng.randrange(8, 30))) for _ in range(300)]
    kinds = [
        GenerationParams(num_beams=4, n=4, max_tokens=32),
        GenerationParams(n=4, temperature=1.0, max_tokens=32),
        GenerationParams(max_tokens=32),
    ]
    requests = []
    for row in range(9):
        params = kinds[row % 3]
        constraint = catalog(items, params, ends_of(rand_model_path))
        requests.append(Request(row, [1, *rng.choices(range(4, 256), k=20)], params, 100 + row, constraint=constraint))
    roomy = run_engine(rand_model_path, requests)
    tight = run_engine(rand_model_path, requests, num_blocks=13, preemption="recompute")
    assert tight.counters.preemptions_recompute > 2
    assert tight.token_ids() == roomy.token_ids()
    written = {tuple(ids[:-1]) for outputs in roomy.token_ids().values() for ids in outputs}
    assert written <= set(items)

"""Which tokens may come, which samples come back, and what their text and logprobs show: worked out on small models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from engines import Run, hf_beams, run_engine, tokenizer
from models import EOS
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pagedbatch.engine.stopping import StopChecker
from pagedbatch.output.records import RecordWriter
from pagedbatch.outputs import CompletionOutput, RequestOutput
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request, TokenNode


def ids(path: Path, text: str) -> list[int]:
    encoded: list[int] = tokenizer(path)(text, add_special_tokens=False).input_ids
    return encoded


def run(path: Path, prompt: str, *, rng_key: int = 7, max_num_seqs: int = 128, **params: Any) -> Run:
    request = Request(0, tokenizer(path)(prompt).input_ids, GenerationParams(**params), rng_key)
    return run_engine(path, [request], max_num_seqs=max_num_seqs)


def outputs(path: Path, prompt: str, **settings: Any) -> list[CompletionOutput]:
    return run(path, prompt, **settings).outputs[0].outputs


def texts(path: Path, prompt: str, **params: Any) -> list[str]:
    """The text of each output, as the records show it."""
    request = Request(0, tokenizer(path)(prompt).input_ids, GenerationParams(**params), 7)
    record = RecordWriter(tokenizer(path)).ok_record("x", run_engine(path, [request]).outputs[0], request)
    return [output["text"] for output in record["outputs"]]


# --- tokens that may come --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_beams", [1, 3])
def test_allowed_token_ids(table_model_path: Path, num_beams: int) -> None:
    """b would come first. Beams sum the model's own logprobs: what is left is not scaled up."""
    allowed = tuple(sorted([EOS, *ids(table_model_path, "cfgh")]))
    for n in {1, num_beams}:
        found = texts(table_model_path, "a", num_beams=num_beams, n=n, max_tokens=8, allowed_token_ids=allowed)
        assert found[0] == "cfgh"
        assert not set("".join(found)) - set("cfgh")
    best = outputs(table_model_path, "a", num_beams=num_beams, max_tokens=8, allowed_token_ids=allowed)[0]
    assert best.cumulative_logprob == pytest.approx(math.log(0.3 * 0.9 * 0.95 * 0.95 * 0.98), abs=1e-3)


def test_samples_keep_to_the_allowed_tokens(table_model_path: Path) -> None:
    allowed = tuple(ids(table_model_path, "uv"))
    found = outputs(table_model_path, "t", n=50, temperature=2.0, max_tokens=3, allowed_token_ids=allowed)
    assert {token_id for output in found for token_id in output.token_ids} == set(allowed)


def test_nothing_that_is_allowed_can_come(table_model_path: Path) -> None:
    result = run(table_model_path, "a", max_tokens=3, min_tokens=2, allowed_token_ids=(EOS,)).outputs[0]
    assert result.error == "the row's settings leave no token to choose at this position"


@pytest.mark.parametrize("num_beams", [1, 3])
def test_bad_words_of_one_and_of_several_tokens(table_model_path: Path, num_beams: int) -> None:
    """`fg` may not come in a row; f alone may."""
    b, fg = (tuple(ids(table_model_path, text)) for text in ("b", "fg"))
    settings = {"num_beams": num_beams, "n": num_beams, "max_tokens": 8}
    for text in texts(table_model_path, "a", bad_words=(b, fg), **settings):
        assert "b" not in text
        assert "fg" not in text
    assert "f" in texts(table_model_path, "e", bad_words=(fg,), **settings)


def test_a_bad_word_may_begin_in_the_prompt(table_model_path: Path) -> None:
    cf = tuple(ids(table_model_path, "cf"))
    assert texts(table_model_path, "c", max_tokens=1) == ["f"]
    assert texts(table_model_path, "c", max_tokens=1, bad_words=(cf,)) == [""]  # the end is next


def test_bad_words_in_beams_are_those_of_hf(rand_model_path: Path) -> None:
    prompt = tokenizer(rand_model_path)("hello").input_ids
    free = GenerationParams(num_beams=4, n=4, max_tokens=12)
    plain = run_engine(rand_model_path, [Request(0, prompt, free)]).outputs[0].outputs[0].token_ids
    words = ((plain[0],), (plain[1], plain[2]), (*plain[3:6],))
    params = GenerationParams(num_beams=4, n=4, max_tokens=12, bad_words=words)
    found = run_engine(rand_model_path, [Request(0, prompt, params)]).outputs[0].outputs
    expected = hf_beams(rand_model_path, prompt, params, bad_words_ids=[list(word) for word in words])
    assert [output.token_ids for output in found] == [token_ids for token_ids, _ in expected]
    assert [output.score for output in found] == pytest.approx([score for _, score in expected], abs=1e-4)


# --- samples that come back ------------------------------------------------------------------------------------------


def test_best_of_returns_the_best_of_the_samples(table_model_path: Path) -> None:
    settings = {"temperature": 1.0, "max_tokens": 8}
    drawn = outputs(table_model_path, "a", n=30, **settings)
    best = outputs(table_model_path, "a", n=4, best_of=30, **settings)
    ranked = sorted(drawn, key=lambda output: -output.cumulative_logprob / len(output.token_ids))
    assert [output.token_ids for output in best] == [output.token_ids for output in ranked[:4]]
    assert [output.index for output in best] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in drawn}) > 4


def test_a_row_of_many_samples_is_many_rows_of_one(rand_model_path: Path) -> None:
    """Rows with the key of the one, each with a sample index of its own."""
    prompt = tokenizer(rand_model_path)("some prompt of a length").input_ids
    settings: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 20}
    whole = run_engine(rand_model_path, [Request(0, prompt, GenerationParams(n=12, **settings), 99)])
    rows = [Request(i, prompt, GenerationParams(sample_index=i, **settings), 99) for i in range(12)]
    apart = run_engine(rand_model_path, rows, max_num_seqs=5)
    assert [apart.token_ids()[i][0] for i in range(12)] == whole.token_ids()[0]
    later = run_engine(rand_model_path, [Request(0, prompt, GenerationParams(n=5, sample_index=7, **settings), 99)])
    assert later.token_ids()[0] == whole.token_ids()[0][7:]


def test_neighbours_with_other_settings_change_nothing(rand_model_path: Path) -> None:
    """Rows with and without a seed of their own, greedy rows and ones with every control, alone and together."""
    prompt = tokenizer(rand_model_path)("one prompt").input_ids
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "n": 3, "seed": 5},
        {"temperature": 1.0, "n": 3},
        {},
        {"temperature": 0.7, "bad_words": ((9,), (40, 41)), "logprobs": 2, "logprobs_mode": "processed"},
        {"temperature": 1.5, "top_k": 9, "repetition_penalty": 1.3, "allowed_token_ids": tuple(range(2, 90))},
        {"num_beams": 3, "n": 3, "no_repeat_ngram_size": 2},
    ]
    rows = [Request(i, prompt, GenerationParams(max_tokens=15, **kind), 50 + i) for i, kind in enumerate(kinds)]
    together = run_engine(rand_model_path, rows).token_ids()
    for row in rows:
        assert run_engine(rand_model_path, [row]).token_ids()[row.request_id] == together[row.request_id]
    assert len({str(token_ids) for token_ids in together.values()}) == len(rows)


# --- logprobs --------------------------------------------------------------------------------------------------------


def test_processed_logprobs_are_those_of_the_draw(table_model_path: Path) -> None:
    """At temperature 0.5 the odds are squared; of b .25, c .09 and the end .04, top-p 0.85 keeps b and c."""
    b, c = ids(table_model_path, "bc")
    settings = {"temperature": 0.5, "top_p": 0.85, "max_tokens": 1, "logprobs": 5, "logprobs_mode": "processed"}
    (output,) = outputs(table_model_path, "a", **settings)
    assert output.top_logprobs is not None
    top = output.top_logprobs[0]
    assert [token_id for token_id, _ in top] == [b, c]  # what was filtered out can't come, and isn't listed
    assert [logprob for _, logprob in top] == pytest.approx([math.log(25 / 34), math.log(9 / 34)], abs=1e-3)
    assert output.token_logprobs[0] == output.cumulative_logprob == dict(top)[output.token_ids[0]]


def test_processed_logprobs_of_a_greedy_row(table_model_path: Path) -> None:
    b, c = ids(table_model_path, "bc")
    for mode, expected in (("raw", math.log(0.3)), ("processed", math.log(0.3 / 0.5))):
        settings = {"max_tokens": 1, "bad_words": ((b,),), "logprobs": 1, "logprobs_mode": mode}
        (output,) = outputs(table_model_path, "a", **settings)
        assert output.token_ids == [c]
        assert output.token_logprobs == pytest.approx([expected], abs=1e-3)


def test_processed_logprobs_beside_raw_ones(table_model_path: Path) -> None:
    prompt = tokenizer(table_model_path)("a").input_ids
    settings: dict[str, Any] = {"temperature": 0.5, "max_tokens": 1, "logprobs": 1}
    rows = [
        Request(i, prompt, GenerationParams(logprobs_mode=mode, **settings), 7)
        for i, mode in enumerate(["raw", "processed", "raw"])
    ]
    found = run_engine(table_model_path, rows).outputs
    tops = [found[i].outputs[0].top_logprobs for i in range(3)]
    assert [top[0][0][1] for top in tops if top] == pytest.approx(
        [math.log(0.5), math.log(25 / 38), math.log(0.5)], abs=1e-3
    )


def test_beams_show_processed_logprobs_too(table_model_path: Path) -> None:
    b, c = ids(table_model_path, "bc")
    for mode, best in (("raw", b), ("processed", c)):
        settings = {"num_beams": 2, "max_tokens": 1, "bad_words": ((b,),), "logprobs": 1, "logprobs_mode": mode}
        (output,) = outputs(table_model_path, "a", **settings)
        assert output.top_logprobs is not None
        assert output.top_logprobs[0][0][0] == best


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"stop": ("gh",)}, "f"),
        ({"stop": ("gh",), "include_stop": True}, "fgh"),
        ({"stop": ("g", "fg"), "include_stop": True}, "fg"),
        ({"include_stop": True}, "fgh"),
        ({"skip_special_tokens": False}, "fgh<eos>"),
        ({"skip_special_tokens": False, "stop": ("h<eos>",), "ignore_eos": True}, "fg"),
        ({"skip_special_tokens": True, "stop": ("h<eos>",), "ignore_eos": True, "max_tokens": 5}, "fgh"),
    ],
)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_what_the_text_holds(table_model_path: Path, settings: dict[str, Any], text: str, num_beams: int) -> None:
    settings = {"max_tokens": 8, "length_penalty": 0.0, **settings}
    assert texts(table_model_path, "c", num_beams=num_beams, **settings)[0] == text


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("skip", [True, False])
def test_text_never_holds_the_prompt(rand_model_path: Path, num_beams: int, skip: bool) -> None:
    for text in texts(rand_model_path, "hi", num_beams=num_beams, max_tokens=10, skip_special_tokens=skip):
        assert not text.startswith(("hi", "<bos>"))


HALVES = [
    ("é中文😀", 0, "é中文😀"),
    ("é中文😀", 1, "é中文\ufffd"),
    ("é中文😀", 2, "é中文\ufffd"),
    ("é中文😀", 3, "é中文\ufffd"),
    ("é中文", 1, "é中\ufffd"),
    ("é中文", 2, "é中\ufffd"),
    ("é", 1, "\ufffd"),
]


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token like `<0xF0>`, as in vocabularies made by SentencePiece."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bare = Tokenizer(
        BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    bare.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>")


@pytest.mark.parametrize(("text", "num_cut", "shown"), HALVES)
@pytest.mark.parametrize("fallback", [False, True])
def test_a_character_that_the_limit_cuts_is_one_mark(
    rand_model_path: Path, fallback: bool, text: str, num_cut: int, shown: str
) -> None:
    decode = byte_fallback_tokenizer() if fallback else tokenizer(rand_model_path)
    token_ids = decode(text, add_special_tokens=False).input_ids
    kept = token_ids[: len(token_ids) - num_cut]
    assert len(token_ids) == len(text.encode())
    completion = CompletionOutput(0, kept, [0.0] * len(kept), 0.0, "length", None)
    request = Request(0, [1], GenerationParams())
    (output,) = RecordWriter(decode).ok_record("x", RequestOutput(0, [completion], 1), request)["outputs"]
    assert output["text"] == shown


def test_bytes_that_are_no_half_character_keep_their_marks() -> None:
    """A stray byte before the cut is the model's own, and so is all that an end token follows."""
    writer = RecordWriter(byte_fallback_tokenizer())
    request = Request(0, [1], GenerationParams())

    def marks(data: bytes, finish_reason: str) -> int:
        completion = CompletionOutput(0, [1 + byte for byte in data], [], 0.0, finish_reason, None)
        record = writer.ok_record("x", RequestOutput(0, [completion], 1), request)
        return str(record["outputs"][0]["text"]).count("\ufffd")

    assert marks(b"\xff\xf0\x9f", "length") == 2
    assert marks(b"\xf0\x9f\x98", "stop") == 3
    assert marks(b"\x9f\x98", "length") == 2


def test_a_token_without_a_name_before_the_cut() -> None:
    """Models have more ids than their tokenizers have tokens, and may sample one of those."""
    decode = byte_fallback_tokenizer()
    request = Request(0, [1], GenerationParams())
    token_ids = [1 + 0xFF, len(decode) + 5]
    completion = CompletionOutput(0, token_ids, [0.0, 0.0], 0.0, "length", None)
    (output,) = RecordWriter(decode).ok_record("x", RequestOutput(0, [completion], 1), request)["outputs"]
    assert output["text"] == "\ufffd"
    assert output["token_ids"] == token_ids


def test_stop_strings_among_characters_of_several_tokens() -> None:
    """Wherever the window over the last tokens begins: from inside a character these decoders show only marks."""
    decode = byte_fallback_tokenizer()
    stops = StopChecker(frozenset(), lambda ids, skip: str(decode.decode(ids, skip_special_tokens=skip)))
    for length in range(12):
        params = GenerationParams(stop=("文",), max_tokens=999)
        tail: TokenNode | None = None
        token_ids = decode(length * "é" + "文x", add_special_tokens=False).input_ids
        found = []
        for place, token_id in enumerate(token_ids):
            if stops.check(params, tail, token_id) is not None:
                found.append(place)
                break
            tail = TokenNode(token_id, 0.0, tail)
        assert found == [len(token_ids) - 2]


def test_text_is_one_decoding_of_all_tokens(rand_model_path: Path) -> None:
    """Random weights write random bytes: most characters here are of several tokens, or broken."""
    prompts = [tokenizer(rand_model_path)(f"prompt {i}").input_ids for i in range(20)]
    params = GenerationParams(max_tokens=60, temperature=1.0)
    requests = [Request(i, prompt, params, i) for i, prompt in enumerate(prompts)]
    found = run_engine(rand_model_path, requests).outputs
    writer = RecordWriter(tokenizer(rand_model_path))
    for request in requests:
        (output,) = writer.ok_record("x", found[request.request_id], request)["outputs"]
        assert output["text"] == tokenizer(rand_model_path).decode(output["token_ids"], skip_special_tokens=True)

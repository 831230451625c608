"""Thinking parts as a user meets them: budgets in flags and rows, and records in which the answer stands alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import EOS, rand_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from workplace import run_rows

from pagedbatch.errors import RowError, UsageError
from pagedbatch.input.reader import Row
from pagedbatch.input.requests import ModelLimits, PromptBuilder

TURNS = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eot>{% endfor %}"
#: The prompt opens the part, as DeepSeek-R1's template does; or leaves it to the model, as Qwen3's.
OPENS = TURNS + "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}{# </think> #}"
LEAVES = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}{# <think> </think> #}"
CLOSES = TURNS + "{% if add_generation_prompt %}[assistant]<think>\n\n</think>\n\n{% endif %}"
HI = [{"role": "user", "content": "hi"}]


def thinking_model(path: Path, template: str, *, special: bool = False, tokens: bool = True) -> Path:
    """`rand_model` with tokens for the tags, or without, so that a tag takes several."""
    rand_model(path, chat_template=template)
    if tokens:
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
        tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def opens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_model(tmp_path_factory.mktemp("opens") / "model", OPENS)


@pytest.fixture(scope="module")
def leaves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_model(tmp_path_factory.mktemp("leaves") / "model", LEAVES)


def _ids(model: Path, text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"]
    return ids


def _text(model: Path, token_ids: list[int]) -> str:
    return str(AutoTokenizer.from_pretrained(model).decode(token_ids, skip_special_tokens=True))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_the_part_is_closed_in_time_and_split_off(tmp_path: Path, special: bool, tokens: bool) -> None:
    """Tags of one token, special or not, and of several; greedy, samples, beams."""
    if special and not tokens:
        pytest.skip("no tokens, none special")
    model = thinking_model(tmp_path / "model", OPENS, special=special, tokens=tokens)
    tag = _ids(model, "</think>")
    assert (len(tag) == 1) == tokens
    asked = {
        "messages": HI,
        "max_tokens": 24,
        "ignore_eos": True,
        "allowed_token_ids": [*range(10, 90), *tag, *_ids(model, "<think>")],
    }
    kinds = [{}, {"n": 3, "temperature": 1.0}, {"num_beams": 3, "n": 3}]
    rows = [{**asked, "thinking_budget": budget, **kind} for budget in (0, 1, 5) for kind in kinds]
    for row, record in zip(rows, run_rows(model, tmp_path, rows), strict=True):
        for output in record["outputs"]:
            ids, budget = output["token_ids"], row["thinking_budget"]
            assert len(ids) == 24
            place = next(i for i in range(24) if ids[i : i + len(tag)] == tag)
            assert place <= budget
            assert output["reasoning"] == _text(model, ids[:place]).strip("\n")
            assert output["text"] == _text(model, ids[place + len(tag) :]).lstrip("\n")
        assert record["usage"]["reasoning_tokens"] <= row["thinking_budget"] * len(record["outputs"])
        assert record["usage"]["completion_tokens"] == 24 * len(record["outputs"])


def test_a_part_that_the_model_opens_counts_from_there(leaves: Path, tmp_path: Path) -> None:
    (tag,), (closing,) = _ids(leaves, "<think>"), _ids(leaves, "</think>")
    row = {"messages": HI, "max_tokens": 12, "logit_bias": {tag: 1000}, "thinking_budget": 3, "ignore_eos": True}
    (record,) = run_rows(leaves, tmp_path, [row])
    (output,) = record["outputs"]
    assert output["token_ids"][:5] == [tag] * 4 + [closing]
    assert output["reasoning"] == "<think>" * 3
    assert record["usage"]["reasoning_tokens"] == 3
    (free,) = run_rows(leaves, tmp_path, [{"messages": HI, "max_tokens": 12, "thinking_budget": 3, "ignore_eos": True}])
    (never,) = run_rows(leaves, tmp_path, [{"messages": HI, "max_tokens": 12, "ignore_eos": True}])
    assert free["outputs"] == never["outputs"]  # it does not think
    assert free["outputs"][0]["reasoning"] is None
    assert free["usage"]["reasoning_tokens"] == 0


def test_constraints_hold_the_answer(opens: Path, leaves: Path, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    held: list[dict[str, Any]] = [
        {"allowed_outputs": ["yes", "no", "nobody"], "num_beams": 3, "n": 3},
        {"json_schema": {"enum": [1, 22, 333]}},
        {"regex": "(ab|cd){2}", "n": 2, "temperature": 1.0},
    ]
    for model in (opens, leaves):
        (closing,) = _ids(model, "</think>")
        rows = [{"messages": HI, "max_tokens": 20, "thinking_budget": 4, **each} for each in held]
        for row, record in zip(rows, run_rows(model, tmp_path, rows), strict=True):
            assert len(record["outputs"]) == row.get("n", 1)
            for output in record["outputs"]:
                assert output["token_ids"].index(closing) <= 4 + (model == leaves)
                assert output["finish_reason"] == "stop"
                assert output["reasoning"] is not None
                if "json_schema" in row:
                    assert json.loads(output["text"]) in (1, 22, 333)
                elif "regex" in row:
                    assert output["text"] in {"abab", "abcd", "cdab", "cdcd"}
            if "allowed_outputs" in row and row["thinking_budget"] == 0:
                assert {output["text"] for output in record["outputs"]} == {"yes", "no", "nobody"}


def test_without_a_budget_a_constraint_holds_the_whole_output(opens: Path, tmp_path: Path) -> None:
    (record,) = run_rows(opens, tmp_path, [{"messages": HI, "max_tokens": 20, "allowed_outputs": ["yes"]}])
    (output,) = record["outputs"]
    assert output["text"] == "yes"
    assert "reasoning" not in output


def test_an_item_must_fit_behind_the_part(opens: Path) -> None:
    with pytest.raises(RowError, match=r"no item fits max_tokens 2 .* \(behind a thinking part of up to 8 tokens\)"):
        _request(opens, {"messages": HI, "max_tokens": 10, "thinking_budget": 7, "allowed_outputs": ["yes"]})
    with pytest.raises(RowError, match=r"no item fits .* \(behind a thinking part of up to 21 tokens\)"):
        _request(opens, {"messages": HI, "max_tokens": 10, "thinking_budget": 20, "allowed_outputs": ["y"]})
    request = _request(opens, {"messages": HI, "max_tokens": 100, "thinking_budget": 7, "allowed_outputs": ["yes"]})
    assert request.params.max_tokens == 7 + 1 + 4


def _builder(model: Path) -> PromptBuilder:
    limits = ModelLimits(512, 272, frozenset({EOS, 3}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptBuilder(tokenizer, limits, model_defaults={}, run_settings={})


def _request(model: Path, fields: dict[str, Any]) -> Any:
    return _builder(model).request(Row(index=0, id="a", has_own_id=True, fields=fields))


def test_what_a_prompt_has_opened_and_closed(opens: Path, leaves: Path, tmp_path: Path) -> None:
    """The end of the prompt says it, behind the last token that only a template writes."""
    closes = thinking_model(tmp_path / "closes", CLOSES)
    mention = [{"role": "user", "content": "what is <think>?"}]
    for model, messages, is_open in (
        (opens, HI, True),
        (opens, mention, True),
        (leaves, HI, False),
        (leaves, mention, False),
        (leaves, [*HI, {"role": "assistant", "content": "<think>a</think>b"}, *HI], False),
        (closes, HI, None),
    ):
        thinking = _request(model, {"messages": messages}).thinking
        assert (None if thinking is None else thinking.is_open) == is_open
    assert _request(opens, {"prompt": "<think>\n"}).thinking is None  # no chat, no budget
    for prompt, is_open in (("a <think>\nb", True), ("a <think>b</think> c", None), ("a", False)):
        thinking = _request(opens, {"prompt": prompt, "thinking_budget": 3}).thinking
        assert (None if thinking is None else thinking.is_open) == is_open


def test_a_row_without_thinking_is_what_it_was(rand_model_path: Path, tmp_path: Path) -> None:
    (record,) = run_rows(rand_model_path, tmp_path, [{"messages": HI, "max_tokens": 4}])
    assert "reasoning" not in record["outputs"][0]
    assert "reasoning_tokens" not in record["usage"]


def test_the_shape_of_openai(opens: Path, tmp_path: Path) -> None:
    body = {"messages": HI, "max_tokens": 12, "thinking_budget": 4, "ignore_eos": True}
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    answered, plain = run_rows(opens, tmp_path, [batch, {"id": "b", **body}])
    (choice,) = answered["response"]["body"]["choices"]
    (output,) = plain["outputs"]
    assert choice["message"] == {
        "role": "assistant", "content": output["text"], "reasoning_content": output["reasoning"]
    }  # fmt: skip
    tokens = plain["usage"]["reasoning_tokens"]
    assert 0 < tokens <= 4
    assert answered["response"]["body"]["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}


def test_what_the_length_limit_cuts_while_thinking_is_no_answer(opens: Path, tmp_path: Path) -> None:
    bans = {"bad_words": [_ids(opens, "</think>")]}
    (record,) = run_rows(opens, tmp_path, [{"messages": HI, "max_tokens": 6, "ignore_eos": True, **bans}])
    (output,) = record["outputs"]
    assert output["text"] == ""
    assert output["reasoning"] == _text(opens, output["token_ids"]).strip("\n")
    assert record["usage"]["reasoning_tokens"] == 6


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_be_the_closing_tag(opens: Path, tmp_path: Path, include: bool) -> None:
    row = {"messages": HI, "max_tokens": 9, "thinking_budget": 3, "stop": "</think>", "include_stop": include}
    (record,) = run_rows(opens, tmp_path, [{**row, "ignore_eos": True}])
    (output,) = record["outputs"]
    assert output["stop_reason"] == "</think>"
    assert output["text"] == ""
    assert output["reasoning"] == _text(opens, output["token_ids"][:-1]).strip("\n")


def test_parquet_has_the_parts(opens: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    from pagedbatch.output.parquet import write_parquet

    records = run_rows(opens, tmp_path, [{"messages": HI, "max_tokens": 9, "thinking_budget": 3}])
    write_parquet(tmp_path / "out.parquet", (json.dumps(record).encode() for record in records))
    (row,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["outputs"][0]["reasoning"] == records[0]["outputs"][0]["reasoning"]
    assert row["usage"]["reasoning_tokens"] == records[0]["usage"]["reasoning_tokens"]


def test_a_model_that_marks_no_part_refuses(rand_model_path: Path, opens: Path, tmp_path: Path) -> None:
    row = {"messages": HI, "thinking_budget": 3}
    with pytest.raises(RowError, match="thinking_budget: this model marks no thinking part: neither its chat template"):
        _request(rand_model_path, row)
    with pytest.raises(UsageError, match=r"thinking_budget: this model marks no .* \(for model .*"):
        run_rows(rand_model_path, tmp_path, [{"messages": HI}], thinking_budget=3)
    channels = thinking_model(tmp_path / "channels", TURNS + "<|channel|>final", tokens=False)
    with pytest.raises(RowError, match="it thinks in channels"):
        _request(channels, row)
    with pytest.raises(RowError, match=r"thinking_budget must be 0 or more"):
        _request(opens, {**row, "thinking_budget": -1})
    with pytest.raises(RowError, match="needs <think> and </think>, which allowed_token_ids rules out"):
        _request(opens, {**row, "allowed_token_ids": [5, 6]})
    with pytest.raises(RowError, match="needs <think> and </think>, which bad_words rules out"):
        _request(opens, {**row, "bad_words": ["</think>"]})
    ends = {"stop_token_ids": _ids(opens, "</think>"), "allowed_outputs": ["yes"]}
    with pytest.raises(RowError, match="an end token is part of the tags"):
        _request(opens, {**row, **ends})


def test_tags_that_are_tokens_do_without_a_template(tmp_path: Path) -> None:
    model = thinking_model(tmp_path / "model", TURNS)
    request = _request(model, {"messages": HI, "thinking_budget": 3})
    assert request.thinking is not None
    assert _request(model, {"messages": HI}).thinking is None


def test_several_named_templates(opens: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(opens)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.chat_template = {"default": OPENS, "tool_use": TURNS}
    limits = ModelLimits(512, 272, frozenset({EOS, 3}))
    builder = PromptBuilder(tokenizer, limits, model_defaults={}, run_settings={})
    thinking = builder.request(Row(index=0, id="a", has_own_id=True, fields={"messages": HI})).thinking
    assert thinking is not None
    assert thinking.is_open

"""Tokenizers that do not fit their model, or end each text; and what rows ask of a chat template."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from log_lines import log_lines
from models import BOS, EOS
from tokenizers import processors
from workplace import View, Workplace

from pagedbatch.errors import RowError, UsageError
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.input.row import RawRow, place_row

VOCAB_SIZE = 272  # of which the tokenizer has 260
BEYOND = "the prompt holds '<image>', token id 272, which this model lacks: its embedding table has 272 rows"


@pytest.fixture(scope="module")
def plain_tokenizer(rand_model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(rand_model_path)


@pytest.fixture
def tokenizer(plain_tokenizer: Any) -> Any:
    return copy.deepcopy(plain_tokenizer)


@pytest.fixture
def beyond(tokenizer: Any) -> Any:
    """The tokenizer with a token one past the model's last row: `<image>`."""
    tokenizer.add_tokens([f"<pad{i}>" for i in range(VOCAB_SIZE - 260)])
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("<image>") == VOCAB_SIZE
    return tokenizer


@pytest.fixture(autouse=True)
def told() -> Iterator[list[str]]:
    """What is logged. A test that expects lines takes them out."""
    with log_lines() as lines:
        yield lines
    assert lines == []


def _ids(tokenizer: Any, run: Any = (), **options: Any) -> Any:
    """A function from the fields of a row to its prompt."""
    builder = PromptBuilder(
        tokenizer,
        ModelLimits(40, VOCAB_SIZE, frozenset({EOS}), num_token_ids=260),
        model_defaults={},
        run_settings=dict(run),
        **options,
    )
    return lambda **fields: builder.request(place_row(RawRow(fields), 0)).prompt_token_ids


def _refusal(ids: Any, **fields: Any) -> str:
    with pytest.raises(RowError) as refused:
        ids(**fields)
    return str(refused.value).removeprefix("row 0: ")


def test_a_token_that_the_model_lacks_is_refused_wherever_it_comes_from(beyond: Any) -> None:
    ids = _ids(beyond)
    assert _refusal(ids, prompt="see <image>") == BEYOND
    assert _refusal(ids, prompt="<image>", add_bos=True) == BEYOND
    assert _refusal(ids, messages=[{"role": "user", "content": "<image>"}]) == BEYOND
    assert _refusal(_ids(beyond, chat=True), prompt="<image>") == BEYOND
    assert _refusal(_ids(beyond, prompt_template="{q}"), q="<image>") == BEYOND
    assert "272 is no token id of this model" in _refusal(ids, prompt_token_ids=[5, VOCAB_SIZE])
    assert "272 is no token id of this model" in _refusal(ids, prompt="a", bad_words=["<image>"])
    assert "272 is no token id of this model" in _refusal(ids, prompt="a", allowed_outputs=["b", "<image>"])
    assert ids(prompt="see")


def test_of_a_prompt_that_is_cut_counts_what_is_left(beyond: Any) -> None:
    ids = _ids(beyond, run={"truncate_prompt": "left", "max_tokens": 5})
    assert _refusal(ids, prompt="a" * 50 + "<image>") == BEYOND
    assert len(ids(prompt="<image>" + "a" * 50)) == 35


def test_one_such_row_stops_no_other(tmp_path: Path, rand_model_path: Path, beyond: Any, told: list[str]) -> None:
    from shutil import copytree

    copytree(rand_model_path, tmp_path / "model")
    beyond.save_pretrained(tmp_path / "model")
    place = Workplace(tmp_path, tmp_path / "model")
    rows = [{"id": i, "prompt": f"row {i}", "max_tokens": 3} for i in range(4)]
    place.write(rows)
    assert place.run().exit_code == 0
    whole = place.records()
    place.write([rows[0], {**rows[1], "prompt": "<image>"}, *rows[2:]])
    assert place.run(restart=True).exit_code == 3
    records = place.records()
    assert records[1]["error"] == f"line 2: {BEYOND}"
    assert [records[i] for i in (0, 2, 3)] == [whole[i] for i in (0, 2, 3)]
    view = View()
    with pytest.raises(UsageError, match="--strict: 1 of 4 rows can't be answered"):
        place.run(view, strict=True, restart=True)
    assert f"line 2: {BEYOND}" in view.notices
    told.clear()


def test_ids_that_are_padding_are_refused(tokenizer: Any) -> None:
    ids = _ids(tokenizer)
    assert ids(prompt_token_ids=[5, 259]) == [5, 259]
    expected = "is no token of this model's tokenizer, whose last one is 259: ids above it are padding"
    assert _refusal(ids, prompt_token_ids=[5, 260]) == f"prompt_token_ids: 260 {expected}"
    assert _refusal(ids, prompt_token_ids=[271, 5]) == f"prompt_token_ids: 271 {expected}"


TOLD = "the tokenizer puts the end token <eos> behind every prompt: it is left out"


@pytest.mark.parametrize("form", ["$A <eos>", "<bos> $A <eos>"])
def test_an_end_token_that_the_tokenizer_appends_is_left_out(tokenizer: Any, form: str, told: list[str]) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    assert tokenizer("hi")["input_ids"][-1] == EOS
    ids = _ids(tokenizer)
    bare = tokenizer("hi", add_special_tokens=False)["input_ids"]
    front = [BOS] if form.startswith("<bos>") else []
    assert ids(prompt="hi") == [*front, *bare]
    assert ids(prompt="hi<eos>") == [*front, *bare, EOS]  # the user's own stays
    assert ids(prompt="hi", add_bos=True) == [BOS, *bare]
    assert ids(messages=[{"role": "user", "content": "hi"}])[0] == BOS
    if not front:
        assert "the prompt is empty" in _refusal(ids, prompt="")
    assert told == [TOLD]
    told.clear()


def test_another_token_behind_a_text_stays(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eot>", special_tokens=[("<eot>", 3)]
    )
    assert _ids(tokenizer)(prompt="hi")[-1] == 3
    assert _ids(tokenizer)(prompt="hi") == tokenizer("hi")["input_ids"]


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", TOOLS),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("continue_final_message", True),
        ("add_generation_prompt", True),
    ],
)
def test_what_is_for_chats_is_refused_without_one(tokenizer: Any, name: str, value: Any) -> None:
    ids = _ids(tokenizer)
    expected = f"{name} is for chats, and this row has none: give messages, or wrap prompts with --chat"
    assert _refusal(ids, prompt="a", **{name: value}) == expected
    assert _refusal(ids, prompt_token_ids=[5], **{name: value}) == expected


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_a_column_that_the_prompt_is_made_of_is_data(tokenizer: Any, name: str) -> None:
    plain = _ids(tokenizer)(prompt="data")
    assert _ids(tokenizer, prompt_column=name)(**{name: "data"}) == plain
    assert _ids(tokenizer, prompt_template=f"{{{name}.x}}")(**{name: {"x": "data"}}) == plain


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"chat_template_kwargs": {"a": None}},
                                    {"continue_final_message": False}, {"add_generation_prompt": False}])  # fmt: skip
def test_what_asks_for_nothing_is_no_error(tokenizer: Any, fields: dict[str, Any]) -> None:
    assert _ids(tokenizer)(prompt="a", **fields) == _ids(tokenizer)(prompt="a")


def test_chat_options_of_rows_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = chat_templates.QWEN3
    limits = ModelLimits(4000, VOCAB_SIZE)
    messages = [{"role": "user", "content": "hi"}]

    def text(*, chat: bool = False, run: Any = (), **fields: Any) -> str:
        builder = PromptBuilder(tokenizer, limits, model_defaults={}, run_settings=dict(run), chat=chat)
        return str(tokenizer.decode(builder.request(place_row(RawRow(fields), 0)).prompt_token_ids))

    def theirs(messages: Any = messages, add_generation_prompt: bool = True, **options: Any) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        )

    quick = {"chat_template_kwargs": {"enable_thinking": False}}
    assert text(messages=messages, tools=TOOLS) == theirs(tools=TOOLS) == text(prompt="hi", chat=True, tools=TOOLS)
    assert text(messages=messages, **quick) == theirs(enable_thinking=False) == text(prompt="hi", chat=True, **quick)
    assert text(messages=messages, add_generation_prompt=False) == theirs(add_generation_prompt=False)
    begun = [*messages, {"role": "assistant", "content": "Well"}]
    goes_on = theirs(begun, add_generation_prompt=False, continue_final_message=True)
    assert text(messages=begun, continue_final_message=True) == goes_on
    assert text(messages=begun, run={"continue_final_message": True}) == goes_on
    assert text(messages=begun, run={"continue_final_message": True}, continue_final_message=False) == theirs(begun)

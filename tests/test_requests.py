"""From rows to requests, with real tokenizers: prompts, parameters, random keys, and what is a row's error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from log_lines import log_lines
from models import BOS

from pagedbatch.errors import RowError, UsageError
from pagedbatch.input.requests import ModelLimits, PromptBuilder, template_fields
from pagedbatch.input.row import RawRow, place_row
from pagedbatch.sequence import Request

LIMIT = 40
VOCAB_SIZE = 272


@pytest.fixture(scope="module")
def tokenizer(rand_model_path: Path) -> Any:
    """Byte-level, adds BOS, with a chat template that writes BOS itself."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(rand_model_path)


@pytest.fixture(scope="module")
def bare_tokenizer(table_model_path: Path) -> Any:
    """One letter a token, adds nothing, without a chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(table_model_path)


@pytest.fixture(autouse=True)
def told() -> Iterator[list[str]]:
    """What is logged. A test that expects lines takes them out."""
    with log_lines() as lines:
        yield lines
    assert lines == []


def _builder(tokenizer: Any, *, defaults: Any = (), run: Any = (), **options: Any) -> PromptBuilder:
    limits = ModelLimits(max_model_len=LIMIT, vocab_size=VOCAB_SIZE)
    return PromptBuilder(tokenizer, limits, model_defaults=dict(defaults), run_settings=dict(run), **options)


def _request(builder: PromptBuilder, fields: dict[str, Any], index: int = 0) -> Request:
    return builder.request(place_row(RawRow(fields, line=index + 1), index))


def _refusal(builder: PromptBuilder, fields: dict[str, Any]) -> str:
    with pytest.raises(RowError) as refused:
        _request(builder, fields)
    message = str(refused.value)
    assert message.startswith("line 1: ")
    assert "\n" not in message
    return message.removeprefix("line 1: ")


def test_bos_stands_once_whoever_writes_it(tokenizer: Any, told: list[str]) -> None:
    builder = _builder(tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    by_template = _request(builder, {"messages": messages}).prompt_token_ids
    templated = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert templated.startswith("<bos>")
    assert _request(builder, {"prompt": templated}).prompt_token_ids == by_template
    assert _request(_builder(tokenizer, chat=True), {"prompt": "hi"}).prompt_token_ids == by_template
    plain = _request(builder, {"prompt": "hi"}).prompt_token_ids
    for token_ids in (by_template, plain):
        assert token_ids.count(BOS) == 1
        assert token_ids[0] == BOS
    assert tokenizer(templated)["input_ids"][:2] == [BOS, BOS]  # what would happen otherwise
    assert _request(builder, {"prompt": templated}).prompt_token_ids == by_template
    assert told == ["a prompt begins with BOS itself: it gets no second one (--add-bos forces it)"]
    told.clear()


@pytest.mark.parametrize(
    ("text", "add_bos", "num_bos"),
    [("hi", True, 1), ("<bos>hi", True, 2), ("hi", False, 0), ("<bos>hi", False, 1), ("<bos>hi", None, 1)],
)
def test_bos_by_force(tokenizer: Any, told: list[str], text: str, add_bos: bool | None, num_bos: int) -> None:
    builder = _builder(tokenizer)
    token_ids = _request(builder, {"prompt": text, "add_bos": add_bos}).prompt_token_ids
    assert token_ids[:num_bos] == [BOS] * num_bos
    assert token_ids.count(BOS) == num_bos
    assert len(token_ids) == num_bos + 2
    told.clear()  # of BOS that stands in a text


def test_bos_where_the_tokenizer_adds_none(bare_tokenizer: Any) -> None:
    builder = _builder(bare_tokenizer)
    assert _request(builder, {"prompt": "a", "add_bos": True}).prompt_token_ids[0] == BOS
    assert BOS not in _request(builder, {"prompt": "a"}).prompt_token_ids
    without = copy.deepcopy(bare_tokenizer)
    without.bos_token = None
    refusal = _refusal(_builder(without), {"prompt": "a", "add_bos": True})
    assert refusal == "add_bos: this model's tokenizer has no BOS token"


def test_prompts_from_columns(bare_tokenizer: Any) -> None:
    def text(fields: dict[str, Any], **options: Any) -> str:
        request = _request(_builder(bare_tokenizer, **options), fields)
        return str(bare_tokenizer.decode(request.prompt_token_ids))

    assert text({"q": "abc", "prompt": 5}, prompt_column="q") == "abc"
    assert text({"a": {"b": "xyz"}}, prompt_column="a.b") == "xyz"
    assert text({"a.b": "dotted", "a": {"b": "xyz"}}, prompt_column="a.b") == "dotted"
    assert text({"q": "ab", "n": 1, "k": 7}, prompt_template="X{q} {k}.{q}") == "Xab 7.ab"
    assert text({"prompt": "abc", "other": {"x": [1]}}) == "abc"


def test_a_template_may_hold_braces_and_its_values_too(tokenizer: Any) -> None:
    builder = _builder(tokenizer, prompt_template="{{{q}}}")
    assert tokenizer.decode(_request(builder, {"q": "{x} {"}).prompt_token_ids[1:]) == "{{x} {}"


@pytest.mark.parametrize("template", ["no column", "{}", "{a!r}", "{a:>10}", "{a", "{0.__class__!s}"])
def test_templates_that_do_more_than_name_columns(template: str) -> None:
    with pytest.raises(UsageError, match="--prompt-template"):
        template_fields(template)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no prompt: the row needs prompt, messages or prompt_token_ids"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "prompt and prompt_token_ids are given: a row takes one of them"),
        ({"prompt": 5}, "prompt must be text, got 5"),
        ({"prompt": ["a"]}, "prompt must be text, got ['a']"),
        ({"prompt": "\ud800"}, "not Unicode text"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [5, "6"]}, "must be a list of integers"),
        ({"prompt_token_ids": [True]}, "must be a list of integers"),
        ({"prompt_token_ids": "56"}, "must be a list of integers"),
        ({"prompt_token_ids": [5, VOCAB_SIZE]}, "272 is no token id of this model, whose vocabulary has 272"),
        ({"prompt_token_ids": [-1]}, "-1 is no token id"),
        ({"prompt": "a" * LIMIT}, "the prompt has 40 tokens, and the model's limit of 40 leaves no room for one"),
        ({"prompt": "a" * 5000}, "the prompt has 5000 tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages need a chat template"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens must be an integer, got '5'"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens must be 0 or more, got -1"),
        ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids: 999 is no token id"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias: 999 is no token id"),
        ({"prompt": "a", "bad_words": [[5, 999]]}, "bad_words: 999 is no token id"),
        ({"prompt": "a", "allowed_token_ids": [999]}, "allowed_token_ids: 999 is no token id"),
        (
            {"prompt": "a", "truncate_prompt": "middle"},
            "truncate_prompt must be one of error, left, right, got",
        ),
        ({"prompt": "a", "priority": "high"}, "priority must be an integer, got 'high'"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n 2 with temperature 0"),
    ],
)
def test_what_is_wrong_with_a_row(bare_tokenizer: Any, fields: dict[str, Any], reason: str) -> None:
    assert reason in _refusal(_builder(bare_tokenizer), fields)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages must be a list of at least one message"),
        ("hi", "messages must be a list"),
        (["hi"], "messages[0] must be an object with a role and a content"),
        ([{"content": "hi"}], "messages[0] must be an object with a role"),
        ([{"role": "user", "content": 5}], "messages[0].content must be text, got 5"),
        ([{"role": "user", "content": "\udfff"}], "messages[0] holds half of a surrogate pair"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content: only text parts"),
    ],
)
def test_what_is_wrong_with_messages(tokenizer: Any, messages: Any, reason: str) -> None:
    assert reason in _refusal(_builder(tokenizer), {"messages": messages})


def test_text_parts_are_joined(tokenizer: Any) -> None:
    builder = _builder(tokenizer)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = _request(builder, {"messages": [{"role": "user", "content": "ab"}]})
    assert _request(builder, {"messages": [{"role": "user", "content": parts}]}).prompt_token_ids == (
        joined.prompt_token_ids
    )


def test_a_template_that_refuses_is_the_rows_error(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system\\nrole') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    builder = _builder(tokenizer)
    message = _refusal(builder, {"messages": [{"role": "system", "content": "be brief"}]})
    assert message == "the chat template refuses the messages: no system"
    assert _request(builder, {"messages": [{"role": "user", "content": "hi"}]}).prompt_token_ids


def test_a_system_message_moves_into_the_first_user_message(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "yes"}
    builder = _builder(tokenizer)

    def ids(*messages: dict[str, str], **fields: Any) -> list[int]:
        return _request(builder, {"messages": list(messages), **fields}).prompt_token_ids

    folded = {"role": "user", "content": "be brief\n\nhi"}
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}")
    assert ids(system, question, system_to_user=True) == ids(folded)
    assert ids(system, system, question, system_to_user=True)[1:9] == ids(folded)[1:9]
    assert ids(system, answer, question, system_to_user=True) == ids(answer, folded)
    assert ids(system, system_to_user=True) == ids({"role": "user", "content": "be brief"})
    assert ids(question, answer, system_to_user=True) == ids(question, answer)
    assert ids(system, question) != ids(folded)


def test_chat_without_a_template_is_refused_at_the_start(bare_tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="--chat: this model's tokenizer has no chat template"):
        _builder(bare_tokenizer, chat=True)


def test_columns_that_a_row_lacks(bare_tokenizer: Any) -> None:
    builder = _builder(bare_tokenizer, prompt_template="{q} {x}")
    assert _refusal(builder, {"q": "a"}) == "the row has no column 'x'"
    assert _refusal(builder, {"q": "a", "x": None}) == "column 'x' is empty"
    assert _refusal(builder, {"q": "a", "x": ["b"]}) == "column 'x' must hold text, got ['b']"
    nested = _builder(bare_tokenizer, prompt_column="a.b")
    assert _refusal(nested, {"a": "text"}) == "the row has no column 'a.b'"


def test_a_rows_settings_win_over_the_runs_and_those_over_the_models(bare_tokenizer: Any) -> None:
    builder = _builder(
        bare_tokenizer,
        defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        run={"top_p": 0.8, "top_k": 10, "max_tokens": 7},
    )
    params = _request(builder, {"prompt": "a", "top_k": 5, "max_tokens": None}).params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.8, 5, 7)


def test_a_models_sampling_defaults_are_not_held_against_beams(bare_tokenizer: Any) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9}
    for run, row in (({"num_beams": 4}, {}), ({}, {"num_beams": 4})):
        params = _request(_builder(bare_tokenizer, defaults=defaults, run=run), {"prompt": "a", **row}).params
        assert (params.num_beams, params.temperature, params.top_p) == (4, 0.0, 1.0)
    params = _request(
        _builder(bare_tokenizer, defaults=defaults, run={"num_beams": 4}), {"prompt": "a", "num_beams": 1}
    )
    assert params.params.temperature == 0.6
    explicit = _builder(bare_tokenizer, run={"num_beams": 4, "temperature": 0.6})
    assert "can't be combined" in _refusal(explicit, {"prompt": "a"})


def test_bad_words_are_encoded(tokenizer: Any) -> None:
    """A text of as many tokens with a space before it is banned there too: in this byte vocabulary none is."""
    builder = _builder(tokenizer, run={"bad_words": ["ab", "é"]})
    encode = tokenizer.convert_tokens_to_ids
    assert builder.resolve_params({}).bad_words == ((encode("a"), encode("b")), (encode("Ã"), encode("©")))
    assert builder.resolve_params({"bad_words": [[5, 6], [7]]}).bad_words == ((5, 6), (7,))


def test_a_bad_word_is_banned_behind_a_space_too() -> None:
    """Where the vocabulary has it as a word of its own, as most have: here `cat` and ` cat`, but no ` dog`."""

    class Words:
        chat_template = None
        ids: ClassVar = {"cat": [10], " cat": [11], "dog": [12], " dog": [5, 12]}

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": self.ids[text]}

    words = _builder(Words()).resolve_params({"bad_words": ["cat", "dog"]}).bad_words
    assert words == ((10,), (11,), (12,))


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1, 600])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_tokens", [0, 1, 8, 256])
def test_prompts_cut_on_request(tokenizer: Any, length: int, side: str, max_tokens: int) -> None:
    """BOS and `length - 1` letters, in a context of 40 tokens."""
    builder = _builder(tokenizer, run={"truncate_prompt": side})
    text = "".join(chr(ord("a") + i % 26) for i in range(length - 1))
    whole = tokenizer(text)["input_ids"]
    request = _request(builder, {"prompt": text, "max_tokens": max_tokens})
    num_kept = len(request.prompt_token_ids)
    fits = length + min(1, max_tokens) <= LIMIT
    assert num_kept == (length if fits else LIMIT - min(max_tokens, LIMIT // 2))
    assert request.num_truncated_tokens == length - num_kept
    assert request.prompt_token_ids[0] == BOS
    expected = whole[:num_kept] if side == "right" else [BOS, *whole[length - num_kept + 1 :]]
    assert request.prompt_token_ids == expected
    assert request.params.max_tokens == min(max_tokens, LIMIT - num_kept)


def test_a_prompt_without_bos_is_cut_too(bare_tokenizer: Any) -> None:
    builder = _builder(bare_tokenizer, run={"truncate_prompt": "left", "max_tokens": 5})
    ids = list(range(4, 30)) * 2
    assert _request(builder, {"prompt_token_ids": ids}).prompt_token_ids == ids[-35:]


def test_scoring_alone_needs_no_room(bare_tokenizer: Any) -> None:
    builder = _builder(bare_tokenizer, run={"max_tokens": 0})
    assert _request(builder, {"prompt": "a" * LIMIT}).num_truncated_tokens == 0
    assert "leaves no room" in _refusal(builder, {"prompt": "a" * (LIMIT + 1)})


def test_max_tokens_is_cut_down_to_the_room_that_is_left(bare_tokenizer: Any) -> None:
    builder = _builder(bare_tokenizer, run={"max_tokens": 30})
    assert _request(builder, {"prompt": "a" * 10}).params.max_tokens == 30
    params = _request(builder, {"prompt": "a" * 39, "min_tokens": 5}).params
    assert (params.max_tokens, params.min_tokens) == (1, 1)


def test_random_keys_depend_on_seed_and_id_alone(bare_tokenizer: Any) -> None:
    builder = _builder(bare_tokenizer)

    def key(row_id: Any, index: int = 0, **row: Any) -> int:
        return _request(builder, {"id": row_id, "prompt": "a", **row}, index).rng_key

    assert key("x") == key("x", index=5, temperature=1, max_tokens=3)
    keys = [key("x"), key("y"), key(1), key("1"), key("x", seed=1), key(None, index=0), key(None, index=2)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_priority_and_index_reach_the_request(bare_tokenizer: Any) -> None:
    request = _request(_builder(bare_tokenizer), {"id": "x", "prompt": "a", "priority": -3}, index=4)
    assert (request.request_id, request.priority) == (4, -3)


def test_what_is_nested_too_deeply_is_the_rows_error(tokenizer: Any) -> None:
    builder, text = _builder(tokenizer), "[" * 100_000
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    nested: Any = {}
    for _ in range(2000):
        nested = {"a": nested}
    for messages in (
        text,
        [{"role": "assistant", "tool_calls": [call]}],
        [{"role": "user", "content": "a", "b": nested}],
    ):
        assert _refusal(builder, {"messages": messages}) == "it holds values that are nested too deeply"

"""Rows made to stop a job: fifty kinds written out, and strategies for any number of others. Knows no test."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from pagedbatch.params import READERS

#: Rows that must come out the same whatever stands beside them.
HEALTHY: list[dict[str, Any]] = [
    {"id": "greedy", "prompt": "hi there", "max_tokens": 6},
    {"id": "samples", "prompt": "hi there, you", "n": 3, "temperature": 0.9, "top_p": 0.95, "max_tokens": 5},
    {"id": "beams", "prompt": "one two", "num_beams": 3, "n": 2, "max_tokens": 5, "logprobs": 2},
    {"id": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "repetition_penalty": 1.3},
]

_DIGIT = {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}


def _line(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": "x", **fields}).encode()


def _chat(*messages: Any, **fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"messages": list(messages), **fields}).encode()


def _batch(url: str = "/v1/completions", **body: Any) -> Callable[[], bytes]:
    row = {"custom_id": f"batch {url} {sorted(body)}", "method": "POST", "url": url, "body": {"prompt": "x", **body}}
    return lambda: json.dumps(row).encode()


def _deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": [value]}
    return value


#: Of the kinds below, those that can be answered on a machine with time and memory for them.
MAY_BE_ANSWERED = {
    "temperature below what float32 holds",
    "an enum of 100,000 texts",
    "a regular expression that explodes",
}

#: A line of each kind; the others can't be answered. Made when asked for: some have megabytes.
KINDS: dict[str, Callable[[], bytes]] = {
    "n of a billion": _line(n=10**9),
    "n beyond 64 bits": _line(n=2**70, temperature=1.0),
    "best_of of ten million": _line(best_of=10**7, temperature=1.0),
    "top_k of 1e30": _line(top_k=10**30, temperature=1.0),
    "sample_index beyond 64 bits": _line(sample_index=2**64, temperature=1.0),
    "a million beams": _line(num_beams=10**6),
    "max_tokens beyond 64 bits": _line(max_tokens=2**80),
    "min_tokens above max_tokens": _line(min_tokens=10**12, max_tokens=5),
    "no_repeat_ngram_size of 1e30": _line(no_repeat_ngram_size=10**30),
    "logprobs of a billion": _line(logprobs=10**9),
    "temperature of 1e300": _line(temperature=1e300),
    "temperature below what float32 holds": _line(temperature=1e-300),
    "repetition_penalty below what float32 holds": _line(repetition_penalty=1e-300),
    "length_penalty of 1e9": _line(num_beams=2, length_penalty=1e9),
    "logit_bias of 1e308 in beams": _line(num_beams=4, logit_bias={"70": 1e308}),
    "logit_bias of no token": _line(logit_bias={"99999999": 1.0}),
    "priority beyond 64 bits": _line(priority=10**40),
    "min_p in words": _line(min_p="high"),
    "a prompt of ten megabytes": _line(prompt="word " * 2_000_000),
    "two million token ids": lambda: b'{"prompt_token_ids": [%b]}' % b",".join([b"70"] * 2_000_000),
    "a token id beyond the table": lambda: b'{"prompt_token_ids": [70, 100000]}',
    "a negative token id": lambda: b'{"prompt_token_ids": [-1]}',
    "no prompt": lambda: b'{"question": "x"}',
    "an empty prompt": lambda: b'{"prompt_token_ids": []}',
    "two prompts": _line(messages=[{"role": "user", "content": "x"}]),
    "half of a surrogate pair": lambda: b'{"prompt": "\\ud800"}',
    "not UTF-8": lambda: b'{"prompt": "\xff\xfe"}',
    "a cut line": lambda: b'{"id": "cut", "prompt": "a',
    "NaN": lambda: b'{"prompt": "x", "temperature": NaN}',
    "a key twice": lambda: b'{"prompt": "x", "prompt": "y"}',
    "no object": lambda: b'["x"]',
    "a hundred thousand deep": lambda: b'{"prompt": "x", "meta": %b}' % (b"[" * 100_000 + b"]" * 100_000),
    "an enum of 100,000 texts": lambda: json.dumps(
        {"prompt": "x", "max_tokens": 4, "json_schema": {"enum": [f"value number {i} of many" for i in range(100_000)]}}
    ).encode(),
    "a schema that can't be held": _line(json_schema={"not": {"type": "string"}}),
    "a schema that leads nowhere": _line(json_schema={"$ref": "#/$defs/none"}),
    "a regular expression that explodes": _line(regex="((a{1,500}){1,500}){1,500}b"),
    "a broken regular expression": _line(regex="(a"),
    "a grammar without root": _line(grammar='start ::= "a"'),
    "two constraints": _line(regex="a", **_DIGIT),
    "a role nobody knows, in no template": _chat({"role": 7, "content": "x"}),
    "a hundred thousand messages": lambda: json.dumps(
        {"messages": [{"role": "user", "content": "hello there"}] * 100_000}
    ).encode(),
    "an image": _chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
    "messages of no list": _line(prompt=None, messages="hello"),
    "tools of no list": _chat({"role": "user", "content": "x"}, tools="search"),
    "template arguments that are reserved": _chat(
        {"role": "user", "content": "x"}, chat_template_kwargs={"messages": [], "tokenize": True}
    ),
    "a tree of template arguments": _chat({"role": "user", "content": "x"}, chat_template_kwargs=_deep(40)),
    "another endpoint": _batch("/v1/embeddings"),
    "a stream": _batch(stream=True),
    "another model": _batch(model="gpt-9"),
    "a format nobody knows": _batch(response_format={"type": "yaml"}),
}
assert len(KINDS) == 50

_NAMES = [
    *sorted(READERS),
    "prompt", "messages", "prompt_token_ids", "id", "priority", "allowed_outputs", "json_schema", "regex", "grammar",
    "tools", "tool_choice", "chat_template_kwargs", "enable_thinking", "continue_final_message",
    "add_generation_prompt", "response_format", "max_new_tokens", "max_completion_tokens", "num_return_sequences",
    "stop_sequences", "do_sample", "sampling_params", "guided_json", "guided_regex", "guided_choice",
    "structured_outputs", "custom_id", "url", "method", "body",
]  # fmt: skip

_INTEGERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from(
        [2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**9, 10**30, -(2**63), -(10**30)]
    ),
)
_FLOATS = st.one_of(
    st.floats(-2, 2, allow_nan=False),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1e-40, 1e38, 1e39, 1e300, 1.7e308, -1e308]),
)
_TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "true", "5", "auto", "user", "<bos>", "\x1b[31m", "\x00", "\ud800", "[red]", "a" * 5000]),
)
_LEAVES = st.one_of(st.none(), st.booleans(), _INTEGERS, _FLOATS, _TEXTS)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(_TEXTS, st.sampled_from(_NAMES)), inner, max_size=4)
    ),
    max_leaves=8,
)
_MANY = st.builds(lambda value, count: [value] * count, _LEAVES, st.sampled_from([1000, 20_000]))

_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "human", ""]),
            "content": _VALUES,
        },
        optional={"tool_calls": _VALUES, "name": _VALUES},
    ),
    max_size=4,
)

#: A row: a prompt that may be good, and options and other keys with values of any type and size.
ROWS = st.builds(
    lambda base, fields: {**base, **fields},
    st.one_of(
        st.just({"prompt": "hello", "max_tokens": 3}),
        st.just({"prompt_token_ids": [70, 71], "max_tokens": 3}),
        st.builds(lambda messages: {"messages": messages, "max_tokens": 3}, _MESSAGES),
        st.builds(
            lambda body, url: {"custom_id": "c", "method": "POST", "url": url, "body": {"max_tokens": 3, **body}},
            st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=4),
            st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
        ),
    ),
    st.dictionaries(st.sampled_from(_NAMES), st.one_of(_VALUES, _MANY), max_size=4),
)


def _damaged(row: dict[str, Any], cuts: list[tuple[float, bytes]]) -> bytes:
    data = json.dumps(row).encode()
    for place, put in cuts:
        at = int(place * len(data))
        data = data[:at] + put + data[at + 1 :]
    return data.replace(b"\n", b" ")


#: A line: a row, or one whose bytes were damaged.
LINES = st.one_of(
    ROWS.map(lambda row: json.dumps(row).encode()),
    st.builds(_damaged, ROWS, st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=3)), min_size=1, max_size=3)),
)

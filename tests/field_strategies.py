"""Hypothesis strategies for the fields of a row: any name and any value that a file can hold."""

from __future__ import annotations

from hypothesis import strategies as st

from pagedbatch.input.fields.field_table import KNOWN

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4)
    | st.sampled_from([2**64, 10**400, -1, 0, 1.0, "auto", "none", "[]", "{}", '{"n": 1}', "json", "true", [], {}]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "json_schema", "schema", "n", "value", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


KEYS = st.sampled_from(sorted(KNOWN - {"prompt", "messages", "prompt_token_ids", "id"})) | st.text(max_size=6)

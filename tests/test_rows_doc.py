"""What docs/rows.md says about the keys of rows is what the program's table says."""

from __future__ import annotations

from pathlib import Path

from pagedbatch.constraint import CONSTRAINT_FIELDS
from pagedbatch.input.fields.field_table import (
    BUNDLES,
    CHAT_FIELDS,
    HARMLESS,
    LACKED,
    PLACE_FIELDS,
    PROMPT_FIELDS,
    SYNONYMS,
    TARGET_FIELDS,
)

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = (REPOSITORY / "docs" / "rows.md").read_text(encoding="utf-8")

#: Our own keys beside the generation options.
MEANINGS = {
    "id": "a string or an integer by which the row is known; else its number, from 0",
    "priority": "an integer; rows with a lower one run first",
    "prompt": "the prompt as text",
    "messages": "a chat, as a list of objects with `role` and `content`, or the JSON text of one",
    "prompt_token_ids": "the prompt as token ids",
    "decoder_prompt": "of an encoder-decoder: what its outputs continue, as text or token ids",
    "allowed_outputs": "a list of texts, or of lists of token ids: the output is one of them",
    "json_schema": "the output is JSON of this schema",
    "regex": "the output as a whole matches this regular expression",
    "grammar": "the output is a text of this EBNF grammar",
    "tools": "functions that the chat template is told of, as in OpenAI's API",
    "documents": "documents for the chat template: a list of objects. Other values are data",
    "chat_template_kwargs": "an object of variables for the chat template",
    "add_generation_prompt": "false: the chat template opens no assistant's turn at the end",
    "continue_final_message": "true: the last message is continued, not closed",
}


def keys_table() -> str:
    names = (*PLACE_FIELDS, *PROMPT_FIELDS, *TARGET_FIELDS, *CONSTRAINT_FIELDS, *CHAT_FIELDS)
    return "\n".join(["| key | meaning |", "| --- | --- |", *(f"| `{name}` | {MEANINGS[name]} |" for name in names)])


def synonyms_table() -> str:
    lines = (f"| `{name}` | {synonym.means} |" for name, synonym in SYNONYMS.items())
    return "\n".join(["| key | read as |", "| --- | --- |", *lines])


def lacked_table() -> str:
    lines = ["| key | asks for nothing | here there is |", "| --- | --- | --- |"]
    for name, lacked in LACKED.items():
        neutral = ", ".join(f"`{value}`" for value in lacked.neutral)
        lines.append(f"| `{name}` | {neutral} | {lacked.instead} |")
    return "\n".join(lines)


def bundle_names() -> str:
    *names, last = (f"`{name}`" for name in BUNDLES)
    return f"{', '.join(names)} and {last}"


def harmless_names() -> str:
    return ", ".join(f"`{name}`" for name in sorted(HARMLESS) if not name.startswith("_"))


def test_the_tables_are_the_programs() -> None:
    for expected in (keys_table(), synonyms_table(), lacked_table()):
        assert expected in PAGE, f"docs/rows.md needs this table:\n\n{expected}"


def test_the_lists_are_the_programs() -> None:
    words = " ".join(PAGE.split())
    for expected in (bundle_names(), harmless_names()):
        assert expected in words, f"docs/rows.md needs this list:\n\n{expected}"

"""Texts far longer than a context: the same tokens as if all of the text had been tokenized, and far fewer read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pagedbatch.errors import RowError
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.input.row import RawRow, place_row
from pagedbatch.sequence import Request

LIMIT = 64
CHARACTERS = 300_000


class Counting:
    """A tokenizer that notes how many characters it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return self._tokenizer(text, **options)


@pytest.fixture(scope="module", params=["rand_model_path", "table_model_path", "stories_path"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Byte-level BPE, a word a letter, and SentencePiece's BPE with bytes for what it does not know."""
    from pagedbatch.model.tokenizer import load_tokenizer

    path: Path = request.getfixturevalue(request.param)
    return load_tokenizer(str(path))


def words(seed: int) -> str:
    draw = random.Random(seed)
    text = " ".join("".join(draw.choices("abcdefgh123", k=draw.randint(1, 9))) for _ in range(CHARACTERS // 5))
    return text[:CHARACTERS]


TEXTS = {
    "words": words(0),
    "one letter": "x" * CHARACTERS,
    "digits": "0123456789" * (CHARACTERS // 10),
    "blanks": " " * (CHARACTERS - 3) + "end",
    "accents": "e\u0301\u00df\u4e2d\U0001f600" * (CHARACTERS // 5),
    "lines": "a\n" * (CHARACTERS // 2),
}

#: Token ids of each whole text, which take longest, by tokenizer.
WHOLE: dict[tuple[int, str], list[int]] = {}


def prepared(tokenizer: Any, text: str, **run: Any) -> Request:
    builder = PromptBuilder(tokenizer, ModelLimits(LIMIT, len(tokenizer)), model_defaults={}, run_settings=run)
    return builder.request(place_row(RawRow({"prompt": text}, line=1), 0))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("max_tokens", [0, 8, 256])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cut_before_tokenizing_is_the_cut_after_it(tokenizer: Any, name: str, side: str, max_tokens: int) -> None:
    text = TEXTS[name]
    counting = Counting(tokenizer)
    request = prepared(counting, text, truncate_prompt=side, max_tokens=max_tokens)
    whole = WHOLE.setdefault((id(tokenizer), name), []) or tokenizer(text)["input_ids"]
    WHOLE[id(tokenizer), name] = whole
    num_kept = LIMIT - min(max_tokens, LIMIT // 2)
    head = whole[:1] if side == "left" and whole[0] == tokenizer.bos_token_id else []
    end = head + whole[len(whole) - num_kept + len(head) :]
    assert request.prompt_token_ids == (end if side == "left" else whole[:num_kept])
    assert 0 < request.num_truncated_tokens <= len(whole) - num_kept
    assert counting.num_characters < CHARACTERS / 10


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_can_not_fit_is_refused_after_a_little_of_it(tokenizer: Any, name: str) -> None:
    counting = Counting(tokenizer)
    with pytest.raises(
        RowError, match=r"line 1: the prompt is too long: the first [\d,]+ of its 300,000 characters are"
    ):
        prepared(counting, TEXTS[name])
    assert counting.num_characters < CHARACTERS / 10


class Swallowing:
    """Blanks are no tokens; every other character is one, and digits are joined by threes from where they begin."""

    bos_token_id = None
    chat_template = None

    def __len__(self) -> int:
        return 1000

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        ids: list[int] = []
        run = ""
        for character in [*text, ""]:
            if character.isdigit():
                run += character
                continue
            ids += [int(run[i : i + 3]) for i in range(0, len(run), 3)]
            run = ""
            if character.strip():
                ids.append(ord(character) % 1000)
        return {"input_ids": ids}


@pytest.mark.parametrize("side", ["error", "left", "right"])
def test_a_text_that_does_fit_is_never_refused_or_cut(side: str) -> None:
    text = "begin" + " " * CHARACTERS + "end"
    request = prepared(Swallowing(), text, truncate_prompt=side)
    assert bytes(request.prompt_token_ids) == b"beginend"
    assert request.num_truncated_tokens == 0


def test_tokens_that_depend_on_where_the_text_begins_are_those_of_the_whole_text() -> None:
    text = "x" + "1234567" * (CHARACTERS // 7)
    request = prepared(Swallowing(), text, truncate_prompt="left", max_tokens=0)
    assert request.prompt_token_ids == Swallowing()(text)["input_ids"][-LIMIT:]


def test_a_chat_keeps_the_bos_that_its_template_writes(rand_model_path: Path) -> None:
    from pagedbatch.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(rand_model_path))
    builder = PromptBuilder(
        tokenizer,
        ModelLimits(LIMIT, len(tokenizer)),
        model_defaults={},
        run_settings={"truncate_prompt": "left", "max_tokens": 4},
    )
    request = builder.request(place_row(RawRow({"messages": [{"role": "user", "content": TEXTS["words"]}]}), 0))
    assert request.prompt_token_ids[0] == tokenizer.bos_token_id
    assert len(request.prompt_token_ids) == LIMIT - 4
    assert tokenizer.decode(request.prompt_token_ids).endswith("[assistant]")

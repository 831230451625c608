"""Chat templates that write the date: that of the run's first start, in every row, however often it is resumed."""

from __future__ import annotations

import json
from datetime import date, datetime
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from models import rand_model
from workplace import View, Workplace

from pagedbatch.errors import UsageError
from pagedbatch.output.journal_entry import MANIFEST_ROW, seal, unseal
from pagedbatch.settings import merge

ROWS = [{"id": i, "messages": [{"role": "user", "content": f"row {i}"}]} for i in range(4)]
SETTINGS = {"max_tokens": 2, "prompt_logprobs": 0}


@pytest.fixture(scope="module")
def dated_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dated_model")
    rand_model(path, chat_template=chat_templates.LLAMA3_2)
    return path


@pytest.fixture
def chats(tmp_path: Path, dated_model_path: Path) -> Workplace:
    place = Workplace(tmp_path, dated_model_path)
    place.write(ROWS)
    return place


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the clock of whatever starts a run."""

    def set_day(day: str) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Clock:
                return cls.fromisoformat(f"{day}T10:20:30")

        monkeypatch.setattr("pagedbatch.output.manifest.datetime", Clock)
        monkeypatch.setattr("pagedbatch.settings.datetime", Clock)

    return set_day


def _days(place: Workplace) -> list[str]:
    """The date in the prompt of each record, read from its prompt logprobs."""
    texts = ["".join(token["token"] for token in record["prompt_logprobs"][1:]) for record in place.records()]
    return [text.partition("Today Date: ")[2].partition("\n")[0] for text in texts]


def test_rows_that_are_added_a_month_later_have_the_first_starts_date(chats: Workplace, today: Any) -> None:
    today("2024-12-31")
    chats.run(limit=2, **SETTINGS)
    assert _days(chats) == ["31 Dec 2024"] * 2
    today("2025-02-01")
    chats.run(**SETTINGS)
    assert _days(chats) == ["31 Dec 2024"] * 4
    assert chats.stats["settings"]["date"] == {"value": None, "source": "default", "used": "2024-12-31"}
    today("2025-02-02")
    chats.run(**SETTINGS)
    assert _days(chats) == ["02 Feb 2025"] * 4  # nothing was left to resume


def test_a_run_that_begins_anew_has_the_day_on_which_it_does(chats: Workplace, today: Any) -> None:
    today("2024-12-31")
    chats.run(limit=2, **SETTINGS)
    today("2025-02-01")
    chats.run(limit=2, **{**SETTINGS, "max_tokens": 1})  # another run, in place of what was finished
    assert _days(chats) == ["01 Feb 2025"] * 2
    today("2025-02-02")
    chats.run(limit=2, restart=True, **{**SETTINGS, "max_tokens": 1})
    assert _days(chats) == ["02 Feb 2025"] * 2


def _interrupt(rows_done: int) -> None:
    if rows_done:
        raise KeyboardInterrupt


def _broken_off(place: Workplace, **settings: Any) -> None:
    """A run whose journal stays, with the finished rows in it."""
    with pytest.raises(KeyboardInterrupt):
        place.run(View(_interrupt), max_num_seqs=1, **SETTINGS, **settings)
    assert place.journal.exists()


def test_a_run_that_was_broken_off_goes_on_with_its_date(chats: Workplace, today: Any) -> None:
    today("2024-12-31")
    _broken_off(chats)
    today("2025-02-01")
    chats.run(**SETTINGS)
    assert _days(chats) == ["31 Dec 2024"] * 4


def test_a_journal_of_an_older_version_goes_on_with_today_and_keeps_it(chats: Workplace, today: Any) -> None:
    today("2024-12-31")
    _broken_off(chats)
    lines = chats.journal.read_bytes().splitlines(keepends=True)
    entry = unseal(lines[0])
    assert entry is not None
    stored = json.loads(entry.record)
    del stored["started"], stored["settings"]["date"], stored["settings"]["chat_template_kwargs"]
    lines[0] = seal(json.dumps(stored).encode(), row=MANIFEST_ROW, ok=True)
    chats.journal.write_bytes(b"".join(lines))
    today("2025-02-01")
    with pytest.raises(KeyboardInterrupt):
        chats.run(View(lambda rows_done: _interrupt(rows_done - 2)), max_num_seqs=1, **SETTINGS)
    today("2025-03-01")
    chats.run(**SETTINGS)
    assert _days(chats)[0] == "31 Dec 2024"
    assert _days(chats)[1:] == ["01 Feb 2025"] * 3


def test_a_date_that_is_asked_for(chats: Workplace, today: Any) -> None:
    today("2024-12-31")
    _broken_off(chats, date="2023-05-06")
    with pytest.raises(UsageError, match="date: was '2023-05-06', now '2023-05-07'"):
        chats.run(date="2023-05-07", **SETTINGS)
    with pytest.raises(UsageError, match="date: was '2023-05-06', now None"):
        chats.run(**SETTINGS)
    chats.run(date="2023-05-06", **SETTINGS)
    assert _days(chats) == ["06 May 2023"] * 4
    assert chats.stats["settings"]["date"] == {
        "value": "2023-05-06", "source": "command line", "used": "2023-05-06",
    }  # fmt: skip


def test_a_date_for_a_template_that_asks_for_it_by_a_variable(tmp_path: Path, today: Any) -> None:
    rand_model(tmp_path / "model", chat_template=chat_templates.LLAMA3_1)
    place = Workplace(tmp_path, tmp_path / "model")
    place.write([*ROWS[:1], {**ROWS[1], "chat_template_kwargs": {"date_string": "never"}}])
    place.run(**SETTINGS)
    assert _days(place) == ["26 Jul 2024", "never"]
    assert "used" not in place.stats["settings"]["date"]
    place.run(date="2023-05-06", **SETTINGS)
    assert _days(place) == ["06 May 2023", "never"]


def test_a_date_that_no_template_writes_is_refused(tmp_path: Path, rand_model_path: Path) -> None:
    place = Workplace(tmp_path, rand_model_path)
    place.write(ROWS)
    with pytest.raises(UsageError, match=r"^--date: this model's chat template writes no date"):
        place.run(date="2023-05-06")


@pytest.mark.parametrize("value", ["2023-5-6", "20230506", "2023-02-30", "today", "", 20230506, "2023-W01-1"])
def test_what_is_no_date(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^--date must be a day as YYYY-MM-DD, such as 2025-01-31, got "):
        merge({"input": "i", "model": "m", "output": "o", "date": value}, {})


def test_a_recipe_may_hold_a_date_of_its_own() -> None:
    assert merge({"input": "i", "model": "m", "output": "o"}, {"date": date(2023, 5, 6)}).date == "2023-05-06"


def test_shards_note_the_date_that_they_wrote(chats: Workplace, today: Any) -> None:
    today("2024-12-31")
    view = View()
    chats.run(view, shard="0/2", **SETTINGS)
    assert "the chat template writes the date, 2024-12-31: --date gives all shards the same" in view.notices
    assert chats.stats["shard"]["settings"]["date"] == "2024-12-31"
    view = View()
    chats.run(view, shard="0/2", date="2023-05-06", **SETTINGS)
    assert not any("--date" in notice for notice in view.notices)
    chats.write([{"prompt": "no chat"}])
    chats.run(view, shard="0/1", **SETTINGS)
    assert chats.stats["shard"]["settings"]["date"] is None
    assert not any("--date" in notice for notice in view.notices)

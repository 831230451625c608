"""What reaches the terminal: no control character, no change of direction, no markup, whoever wrote the text."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_job import without_model

from pagedbatch.cli.app import main
from pagedbatch.cli.terminal import say, show_log
from pagedbatch.printable import printable, printable_values

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f[red]x[/red]\r\n\x00\ud800\u2028"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f[red]x[/red]\r\n\x00\ud800\u2028"


def is_safe(text: str) -> bool:
    controls = {chr(code) for code in (*range(32), *range(127, 160))} - {"\n"}
    return not any(character in controls or 0x202A <= ord(character) <= 0x202E for character in text)


def test_what_steers_a_terminal_is_shown() -> None:
    assert printable(HOSTILE) == SHOWN
    harmless = "é中文😀 \u0645\u200c\u06cc 👩\u200d🚀 [b]"
    assert printable(harmless) == harmless
    safe = {"\\x9b": ["\\x1b\n", 7, None, {"a": True}]}
    assert printable_values({"\x9b": ["\x1b\n", 7, None, {"a": True}]}) == safe


@given(st.text())
def test_any_text_is_one_safe_line(text: str) -> None:
    found = printable(text)
    assert is_safe(found)
    assert len(found.splitlines()) <= 1
    found.encode()


def test_lines_of_a_run_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    assert capsys.readouterr().err == SHOWN + "\n"


def test_what_is_logged_is_safe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pagedbatch", "pagedbatch_kernels"):
        logger = logging.getLogger(name)
        for attribute in ("handlers", "level", "propagate"):
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    show_log()
    logging.getLogger("pagedbatch.run.job").warning("%s", HOSTILE)
    assert capsys.readouterr().err == SHOWN + "\n"


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["pagedbatch", *words])
    with pytest.raises(SystemExit) as ended, without_model():
        main()
    found = capsys.readouterr()
    assert is_safe(found.err + found.out), ascii(found.err + found.out)
    return int(ended.value.code or 0), found.err


def test_ids_columns_paths_and_settings_of_a_run_are_safe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = "a\x1b[31m\u202e[red]"
    rows = [{"id": odd, "prompt": "x"}, {"id": odd, "prompt": "y"}]
    path = tmp_path / f"{odd}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = ("run", path.name, "--model", odd, "--output", f"{odd}.out.jsonl")
    code, err = run(capsys, monkeypatch, *base)
    assert (code, "ids stand more than once: 'a\\x1b[31m\\u202e[red]' in lines 1, 2" in err) == (2, True)
    code, err = run(capsys, monkeypatch, *base, "--allow-duplicate-ids", "--max-tokens", "2")
    assert code == 0
    assert "a\\x1b[31m\\u202e[red].out.jsonl" in err
    assert [json.loads(line)["id"] for line in (tmp_path / f"{odd}.out.jsonl").read_text().splitlines()] == [odd] * 2
    code, err = run(capsys, monkeypatch, *base, "--allow-duplicate-ids", "--prompt-column", odd)
    assert (code, "has no column" in err) == (2, True)
    path.write_text(json.dumps({odd: "x"}) + "\n")
    code, err = run(capsys, monkeypatch, *base, "--restart")
    assert (code, "its columns are a\\x1b[31m" in err) == (2, True)
    assert run(capsys, monkeypatch, "report", f"{odd}.out.stats.json")[0] == 0
    assert run(capsys, monkeypatch, "report", f"{odd}.nothing")[0] == 2
    assert run(capsys, monkeypatch, f"run{odd}")[0] == 2
    assert run(capsys, monkeypatch, "run", "--seed", odd)[0] == 2
    assert run(capsys, monkeypatch, "merge", f"{odd}.out.jsonl", "--output", odd)[0] == 2

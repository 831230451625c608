"""`--help` of every command: nothing is cut at any width, and no flag of an earlier version is gone."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import typer

from pagedbatch.cli.app import app
from pagedbatch.cli.flags import RECIPE
from pagedbatch.options import GROUPS
from pagedbatch.settings import OPTIONS

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NARROW, USUAL, WIDE = 60, 80, 120

#: Flags of version 0.1 that `run` and `plan` share.
_OF_A_RUN = """
    --model -m --recipe --split --subset --streaming --csv-delimiter --prompt-column --prompt-template --chat --no-chat
    --chat-template-kwargs --continue-final-message --no-continue-final-message --add-generation-prompt
    --no-add-generation-prompt --date --system-to-user --no-system-to-user --add-bos --no-add-bos --truncate-prompt
    --generation-config --limit --shard --allow-duplicate-ids --ignore-columns --served-model-name --max-line-bytes
    --row-prepare-timeout --strict --trust-remote-code --ignore-adapter --n -n --best-of --sample-index --temperature
    --top-p --top-k --min-p --seed --max-tokens --min-tokens --thinking-budget --stop --stop-token-ids --include-stop
    --no-include-stop --ignore-eos --skip-special-tokens --no-skip-special-tokens --logprobs --logprobs-mode
    --prompt-logprobs --presence-penalty --frequency-penalty --repetition-penalty --no-repeat-ngram-size --logit-bias
    --bad-words --allowed-token-ids --num-beams --length-penalty --early-stopping --merge-end-tokens
    --no-merge-end-tokens --num-beam-groups --diversity-penalty --constrain-to --json-schema --regex --grammar
    --max-model-len --block-size --kv-memory --num-blocks --max-num-seqs --max-num-batched-tokens --preemption
    --swap-space --prefix-cache --no-prefix-cache --attention --forward --device --dtype"""
#: They are typed in scripts: none may go, or change its name.
FLAGS_OF_0_1 = {
    "run": f"{_OF_A_RUN} --workers --ray-address --output -o --keep --retry-errors --restart",
    "plan": f"{_OF_A_RUN} --expect-tokens --simulate-rows --json",
    "merge": "--output -o",
    "report": "--html",
    "doctor": "--model -m --trust-remote-code",
    "bench": """
    --model -m --dummy-weights --dummy-length --jobs --num-prompts --max-tokens --n -n --num-beams --repeats --generate
    --no-generate --batch-sizes --generate-seconds --device --dtype --attention --forward --kv-memory --max-num-seqs
    --json""",
    "simulate": """
    --input-column --output-column --prefix-column --prefix-length --log-normal --limit --n -n --num-beams
    --sample-lengths --max-tokens --seed --model -m --num-layers --num-kv-heads --head-dim --max-model-len --block-size
    --num-blocks --kv-memory --dtype --max-num-seqs --max-num-batched-tokens --preemption --num-swap-blocks --output
    -o""",
}
Help = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Help:
    """The help of a command, or of the command above all, in a terminal of some width."""

    def show(*command: str, width: int = USUAL) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        assert app([*command, "--help"], standalone_mode=False) in (0, None)
        return capsys.readouterr().out

    return show


def flags_of(command: str) -> set[str]:
    names = {name for param in COMMANDS[command].params for name in [*param.opts, *param.secondary_opts]}
    return {name for name in names if name.startswith("-")} | {"--help", "-h"}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_of_an_earlier_version_is_gone(command: str) -> None:
    assert {*FLAGS_OF_0_1[command].split(), "--help", "-h"} <= flags_of(command)


def test_every_option_is_a_flag_of_run() -> None:
    assert {param.name for param in COMMANDS["run"].params} == OPTIONS.keys() | {RECIPE.name}


@pytest.mark.parametrize("width", [NARROW, USUAL, WIDE])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_no_line_is_longer_than_the_terminal_is_wide(shown: Help, command: str, width: int) -> None:
    assert [line for line in shown(*command.split(), width=width).splitlines() if len(line) > width] == []


@pytest.mark.parametrize("width", [NARROW, USUAL])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_its_whole_name_and_every_value_one(shown: Help, command: str, width: int) -> None:
    entries = re.findall(r"^  (-.*)$", shown(command, width=width), flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(entries))) == flags_of(command)
    valued = [param for param in COMMANDS[command].params if not getattr(param, "is_flag", False)]
    assert [param.name for param in valued if not param.metavar] == []


def test_every_choice_and_every_default_is_shown(shown: Help) -> None:
    text = " ".join(shown("run").split())
    for option in OPTIONS.values():
        assert option.full_help in text
        assert f"default: {option.shown_default}" in option.full_help or not option.shown_default
        if option.read.choices:
            assert f"{option.flag} {'|'.join(option.read.choices)} {option.help}" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_of_help_has_room_for_45_characters(shown: Help, command: str) -> None:
    lines = shown(command).splitlines()
    for line, following in pairwise(line for line in lines if line.startswith("      ")):
        if lines[lines.index(line) + 1] == following:
            assert len(line.strip()) + 1 + len(following.split()[0]) > 45


def test_the_groups_stand_in_their_order(shown: Help) -> None:
    headings = re.findall(r"^[A-Z].*$", shown("run"), flags=re.MULTILINE)
    assert headings[1:] == [*GROUPS, "Options"]


def test_the_help_is_plain_where_no_terminal_shows_it(shown: Help) -> None:
    assert "\x1b" not in shown("run")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", set(COMMANDS)),
        ("run --max-num", {"--max-num-seqs", "--max-num-batched-tokens"}),
        ("run --no-prefix", {"--no-prefix-cache"}),
        ("run --preemption ", {"auto", "swap", "recompute"}),
        ("bench --dtype b", {"bfloat16"}),
    ],
)
def test_the_shell_completes_commands_flags_and_choices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str, offered: set[str]
) -> None:
    words = f"pagedbatch {typed}"
    monkeypatch.setenv("_PAGEDBATCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit):
        app([], prog_name="pagedbatch", standalone_mode=False)
    assert set(capsys.readouterr().out.split()) == offered

"""The live display, fed by hand and timed by a clock of our own: no test waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO, StringIO, TextIOWrapper

import pytest
from rich.console import Console
from snapshots import snapshot

from pagedbatch.cli.progress import PlainProgress, Progress, TerminalProgress, make_progress
from pagedbatch.cli.tally import Tally
from pagedbatch.outputs import EngineCounters, StepSnapshot


class Clock:
    """Stands still until it is told, and counts how often it was read."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


def terminal(width: int = 80) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width, height=24, color_system=None)


def plain() -> Console:
    return Console(file=StringIO(), width=80)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def frames(console: Console) -> list[list[str]]:
    """What stood on the screen after each redraw, as lines without control codes.

    A redraw begins where the cursor goes back up (after its `\\r`).
    """
    pictures = re.split(r"\r(?:\x1b\[[0-9]*[A-Z])*", written(console))
    texts = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", picture).strip("\n") for picture in pictures]
    return [text.split("\n") for text in texts if text]


def busy(output_tokens: int = 0, **values: int) -> StepSnapshot:
    state = {"private": 100, "shared": 50, "cached": 10, "free": 40, "running_groups": 8, "running_sequences": 32}
    preempted = values.pop("preempted", 0)
    return snapshot(
        **{**state, **values}, counters=EngineCounters(output_tokens=output_tokens, preemptions_swap=preempted)
    )


def run_steps(progress: Progress, clock: Clock, steps: int, seconds: float, tokens: int = 100) -> None:
    """Each step takes `seconds`, draws `tokens` tokens and finishes a row."""
    for step in range(1, steps + 1):
        clock.now += seconds
        progress.update(busy(tokens * step), step, 0)


def test_the_console_decides() -> None:
    assert isinstance(make_progress(10, 0, terminal()), TerminalProgress)
    assert isinstance(make_progress(10, 0, plain()), PlainProgress)


def test_a_frame_of_the_terminal_display() -> None:
    console, clock = terminal(), Clock()
    with make_progress(1000, 120, console, clock) as progress:
        clock.now += 10
        first = busy(0)
        progress.update(first, 0, 0)
        clock.now += 4.9
        progress.update(busy(5000, waiting_groups=700, preempted=3), 246, 1)
        shown = frames(console)[-1]
    assert shown == [
        "rows     ███████████████░░░░░░░░░░░░░░░░░░░░░░░░░░   36%  366 of 1,000",
        "speed    1,000 tokens/s   5,000 tokens     13 s left        1 error",
        "pool     █████████████████████▓▓▓▓▓▓▓▓▓▓▒▒░░░░░░░░   75%  live of 200 blocks",
        "         █ private 100    ▓ shared 50      ▒ cached 10      ░ free 40",
        "running  32 sequences     8 rows           700 waiting      3 preempted",
    ]


def test_the_last_frame_says_all_rows_are_done() -> None:
    console, clock = terminal(), Clock()
    with make_progress(10, 4, console, clock) as progress:
        clock.now += 1.9
        progress.update(busy(300), 2, 0)
        clock.now += 0.1  # no redraw is due
        progress.update(busy(600), 6, 2)
    assert frames(console)[-1] == [
        "rows     █████████████████████████████████████████  100%  10 of 10",
        "speed    3,000 tokens/s   600 tokens       0.2 s            2 errors",
    ]


@pytest.mark.parametrize("make_console", [terminal, plain])
def test_a_run_that_breaks_off_does_not_claim_its_end(make_console: Callable[[], Console]) -> None:
    console, clock = make_console(), Clock()

    def run() -> None:
        with make_progress(1000, 0, console, clock) as progress:
            progress.update(busy(100), 999, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert "999 of 1,000" in written(console)
    assert "99%" in written(console)
    assert "100%" not in written(console)


@pytest.mark.parametrize("make_console", [terminal, plain])
def test_a_run_with_nothing_left_to_do(make_console: Callable[[], Console]) -> None:
    console = make_console()
    with make_progress(10, 7, console, Clock()) as progress:
        progress.update(None, 3, 3)
    assert "100%" in written(console)
    assert "3 errors" in written(console)
    assert "tokens/s" not in written(console)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_nothing_wraps_or_moves_while_numbers_grow(width: int) -> None:
    console, clock = terminal(width), Clock()
    with make_progress(100_000, 0, console, clock) as progress:
        for scale in (1, 9, 80, 700, 6000, 40_000):
            clock.now += 1
            progress.update(
                busy(
                    scale * 300,
                    private=scale,
                    shared=min(scale, 10_000),
                    cached=10_000,
                    free=60_000 - scale - min(scale, 10_000),
                    waiting_groups=scale,
                    running_groups=min(scale, 128),
                    running_sequences=min(scale, 512),
                    preempted=scale,
                ),
                2 * scale,
                scale,
            )
    shown = [lines for lines in frames(console) if len(lines) == 5]
    assert len(shown) == 6
    assert all(len(line) <= width for lines in shown for line in lines)
    assert all(lines[4].endswith("preempted") and "tokens" in lines[1] for lines in shown), "nothing is cut"
    for line, columns in ((0, r"%"), (2, r"%"), (3, r"[█▓▒░]"), (4, r"(?<=  )\d")):
        places = {tuple(found.start() for found in re.finditer(columns, lines[line])) for lines in shown}
        assert len(places) == 1, f"line {line} moves: {places}"


def test_a_narrow_terminal_cuts_lines_and_never_wraps_them() -> None:
    console, clock = terminal(width=40), Clock()
    with make_progress(1000, 0, console, clock) as progress:
        run_steps(progress, clock, steps=3, seconds=1.0)
    assert all(len(line) <= 40 for lines in frames(console) for line in lines)
    assert [len(lines) for lines in frames(console)] == [2, 5, 5, 5, 2]


def test_four_redraws_a_second_and_one_look_at_the_clock_a_step() -> None:
    console, clock = terminal(), Clock()
    with make_progress(1000, 0, console, clock) as progress:
        before, reads = written(console).count("speed"), clock.reads
        run_steps(progress, clock, steps=200, seconds=0.0125)
        assert clock.reads - reads == 200
        assert written(console).count("speed") - before == 10


def test_a_plain_line_every_ten_seconds_and_one_at_the_end() -> None:
    console, clock = plain(), Clock()
    with make_progress(100, 10, console, clock) as progress:
        run_steps(progress, clock, steps=50, seconds=0.5)
    lines = written(console).splitlines()
    assert len(lines) == 3
    assert lines[1] == (
        "50 of 100 rows (50%); 200 tokens/s, 4,000 tokens, 20 s left; blocks: 100 private, 50 shared, 10 cached, "
        "40 free, 32 sequences, 8 rows, 0 waiting, 0 preempted"
    )
    assert lines[2] == "60 of 100 rows (60%); 203 tokens/s, 5,000 tokens, 25 s"
    assert "\x1b" not in written(console)


def test_data_on_standard_output_stays_out_of_the_display(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    with make_progress(10, 0, console, Clock()):
        print('{"id": 1}')
    assert capsys.readouterr().out == '{"id": 1}\n'
    assert '{"id": 1}' not in written(console)


def test_a_console_without_block_characters() -> None:
    file = BytesIO()
    console = Console(file=TextIOWrapper(file, encoding="ascii"), force_terminal=True, width=80, color_system=None)
    with make_progress(10, 0, console, Clock()) as progress:
        progress.update(busy(), 5, 0)
    console.file.flush()
    shown = file.getvalue().decode("ascii")
    assert "#" * 21 + "." * 20 + "   50%  5 of 10" in shown
    assert "# private 100    = shared 50" in shown


def tally_at(now: float, tokens: int, rows: int, running: int, tally: Tally | None = None) -> Tally:
    tally = tally or Tally(total_rows=100, resumed=20)
    tally.take(now, busy(tokens, running_groups=running), rows, 0)
    tally.mark()
    return tally


def test_time_left_goes_by_tokens() -> None:
    """30 rows finished and 20 half done are worth 40 of 80: as many tokens again, at 100 a second."""
    tally = tally_at(0.1, 0, rows=0, running=20)
    tally_at(10.0, 1000, rows=30, running=20, tally=tally)
    assert tally.recent_rate == pytest.approx(100)
    assert tally.seconds_left == pytest.approx(10)


def test_time_left_is_not_guessed_before_a_row_finished() -> None:
    tally = tally_at(0.1, 0, rows=0, running=20)
    tally_at(10.0, 1000, rows=0, running=20, tally=tally)
    assert tally.seconds_left is None


def test_speed_is_that_of_the_last_ten_seconds() -> None:
    """100 tokens a second at first, then 10: after ten slow seconds the fast ones are forgotten."""
    tally = Tally(total_rows=100, resumed=0)
    for second in range(41):
        tally_at(second + 0.1, min(second, 20) * 100 + max(0, second - 20) * 10, 0, 1, tally)
    assert tally.recent_rate == pytest.approx(10)
    assert tally.mean_rate == pytest.approx(2200 / 40, rel=0.01)

"""One self-contained HTML page of one or more runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import PurePath
from typing import TypeVar

from pagedbatch.report.html.figures import FIGURES, FigureOfRun
from pagedbatch.report.html.numbers import cards, table
from pagedbatch.report.html.palette import css_variables
from pagedbatch.report.wording import ordered_settings
from pagedbatch.stats.schema import Stats

T = TypeVar("T")

#: Inches. The width of a figure: alone, and beside that of another run. Its letters have the same size in both.
_ALONE, _BESIDE = 8.6, 6.0

#: The page needs nothing from anywhere; with this no browser would fetch anything either.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(runs: Mapping[str, Stats]) -> str:
    """The page of `runs`, which are stats by the name to show; several runs are side by side."""
    names = list(runs)
    title = escape(f"{names[0]}: the account" if len(names) == 1 else f"{' and '.join(names)}: the accounts")
    css = css_variables() + files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    body = [
        f"<h1>{title}</h1>",
        '<p class="lead">What the KV pool of this run held, what sharing saved, and what one region of memory '
        "for each sequence would have taken for the same work.</p>",
        _side_by_side(runs, _headline),
        *(_figure(figure, runs) for figure in FIGURES),
        _numbers(runs),
        *(_settings(name, stats, len(runs) > 1) for name, stats in runs.items()),
        f"<footer>{escape(_made_by(runs))}</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n"
        f"<body>\n<main{' class=several' if len(runs) > 1 else ''}>\n" + "\n".join(filter(None, body)) + "\n</main>\n"
        "</body>\n</html>\n"
    )


def _side_by_side(runs: Mapping[str, T], show: Callable[[T], str]) -> str:
    """`show` of each run's part, under the run's name if there are several."""
    parts = []
    for name, part in runs.items():
        heading = f"<h3>{escape(name)}</h3>" if len(runs) > 1 else ""
        parts.append(f"<div>{heading}{show(part)}</div>")
    return f'<div class="runs">{"".join(parts)}</div>'


def _headline(stats: Stats) -> str:
    setting = stats.settings.get("model")
    model = PurePath("" if setting is None else str(setting.value))
    shown = "".join(
        f'<div class="card"><b>{escape(card.figure)}</b><span>{escape(card.name)}</span>'
        f"<small>{escape(card.note)}</small></div>"
        for card in cards(stats)
    )
    name = model.name if model.is_absolute() else str(model)
    rows = table(stats)["rows"]
    return f'<div class="muted">{escape(name)}; rows {escape(rows)}</div><div class="cards">{shown}</div>'


def _figure(figure: FigureOfRun, runs: Mapping[str, Stats]) -> str:
    """The figure of each run; empty if no run has it."""
    width = _ALONE if len(runs) == 1 else _BESIDE
    drawn = {name: figure.draw(stats, width) for name, stats in runs.items()}
    if not any(drawn.values()):
        return ""

    def show(svg: str | None) -> str:
        return f"<figure>{svg}</figure>" if svg else '<p class="muted">This run has no figures for it.</p>'

    return f"<h2>{escape(figure.title)}</h2>\n<p>{escape(figure.words)}</p>\n{_side_by_side(drawn, show)}"


def _numbers(runs: Mapping[str, Stats]) -> str:
    tables = [table(stats) for stats in runs.values()]
    names = dict.fromkeys(name for each in tables for name in each)
    head = "".join(f"<th>{escape(name)}</th>" for name in runs) if len(runs) > 1 else ""
    lines = _lines((name, *(each.get(name, "-") for each in tables)) for name in names)
    header = f"<thead><tr><th></th>{head}</tr></thead>" if head else ""
    return f'<h2>In numbers</h2>\n<div class="wide"><table>{header}<tbody>{lines}</tbody></table></div>'


def _settings(name: str, stats: Stats, named: bool) -> str:
    lines = _lines((key, setting.text(), setting.source) for key, setting in ordered_settings(stats))
    title = f"Settings of {name}" if named else "Settings"
    return (
        f'<details><summary>{escape(title)}</summary><div class="wide"><table><tbody>{lines}</tbody></table></div>'
        "</details>"
    )


def _lines(lines: Iterable[tuple[str, ...]]) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>\n'
        for name, *cells in lines
    )


def _made_by(runs: Mapping[str, Stats]) -> str:
    versions = [", ".join(f"{key} {value}" for key, value in stats.versions.items()) for stats in runs.values()]
    return "; ".join(dict.fromkeys(versions))

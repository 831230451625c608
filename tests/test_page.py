"""The HTML page: what each recipe's settings give it, that it is whole, stands alone and never changes by itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from stats_files import RECIPES, run_stats, stats_of_recipe

from pagedbatch.cli.report import names_of, report
from pagedbatch.errors import UsageError
from pagedbatch.stats.schema import Stats

pytest.importorskip("matplotlib", reason="the page needs the extra `report`")

from pagedbatch.report.html.figures import FIGURES
from pagedbatch.report.html.page import html_page

VOID = {"meta", "link", "br", "img", "hr", "input"}
EVIL = '"><script>alert(1)</script>&$x$'


class Balance(HTMLParser):
    """Reads a page; fails at a tag that closes what is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(runs: dict[str, dict[str, Any]]) -> str:
    return html_page({name: Stats.from_json(stats) for name, stats in runs.items()})


def check_page(page: str) -> list[ElementTree.Element]:
    """The page is balanced, fetches nothing, runs nothing; returns its pictures."""
    reader = Balance()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    without_namespaces = re.sub(r'xmlns(?::\w+)?="[^"]*"', "", page)
    for fetching in ("http:", "https:", "//", "src=", "@import", "url(http"):
        assert fetching not in re.sub(r"<style>.*?</style>|<td>.*?</td>", "", without_namespaces, flags=re.S), fetching
    assert "#01fe" not in page, "a colour was not given to the page's theme"
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", page, flags=re.S)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_of_each_recipe(recipe: Path) -> None:
    stats = stats_of_recipe(recipe)
    page = page_of({recipe.stem: stats})
    pictures = check_page(page)
    assert len(pictures) == len(FIGURES)
    assert all(picture.get("viewBox") for picture in pictures)
    assert page == page_of({recipe.stem: stats}), "the same stats give the same bytes"
    assert f"{stats['memory']['kv_used']:.1%}" in page


def test_two_runs_stand_side_by_side() -> None:
    page = page_of({"one": run_stats(), "two": run_stats(1000)})
    pictures = check_page(page)
    assert len(pictures) == 2 * sum(figure.draw(Stats.from_json(run_stats()), 6.0) is not None for figure in FIGURES)
    assert page.count("<h3>one</h3>") == page.count("<h3>two</h3>") > 1


def test_a_run_that_lacks_a_figure_says_so_beside_one_that_has_it() -> None:
    page = page_of({"ran": run_stats(), "stood": run_stats(steps=0)})
    check_page(page)
    assert "This run has no figures for it." in page


def test_a_run_without_a_step_has_a_page() -> None:
    page = page_of({"idle": run_stats(steps=0)})
    assert check_page(page) == []
    assert "In numbers" in page


def test_stats_of_an_older_version_have_a_page() -> None:
    stats = run_stats()
    for key in ("peak_map", "swap_seconds"):
        del stats["memory"][key]
    for scheme in stats["memory"]["contiguous"].values():
        del scheme["room"]
    del stats["lengths"]
    assert check_page(page_of({"old": stats}))


def test_what_users_wrote_is_text() -> None:
    stats = run_stats()
    stats["settings"]["model"] = {"value": EVIL, "source": EVIL}
    stats["versions"][EVIL] = EVIL
    page = page_of({EVIL: stats, "other": run_stats()})
    check_page(page)
    assert "alert(1)" in page, "it is shown"


def written(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(run_stats()), encoding="utf-8")
    return path


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    report([written(tmp_path, "out.stats.json")], html=page)
    assert capsys.readouterr().out == ""
    assert "<title>out: the account</title>" in page.read_text(encoding="utf-8")


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [written(tmp_path, "a/out.stats.json"), written(tmp_path, "b/out.stats.json"), written(tmp_path, "c.json")]
    assert list(names_of(paths).values()) == [str(paths[0]), str(paths[1]), "c"]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        report([written(tmp_path, "out.stats.json")], html=tmp_path / "none" / "page.html")


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("pagedbatch.report.html.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pagedbatch\[report\]"):
        report([written(tmp_path, "out.stats.json")], html=tmp_path / "page.html")


def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    """No error on its console, and not one request beside the page itself."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    page = tmp_path / "page.html"
    page.write_text(page_of({"one": run_stats(), "two": run_stats(2)}), encoding="utf-8")
    log = tmp_path / "net.json"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
             f"--log-net-log={log}", "--dump-dom"]  # fmt: skip
    done = subprocess.run([browser, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("<svg") == page.read_text(encoding="utf-8").count("<svg")
    assert "CONSOLE" not in done.stderr, done.stderr
    # What the browser asks for itself, such as the time, has no page's origin.
    assert re.findall(r'"initiator":"(?!not an origin").*', log.read_text(encoding="utf-8")) == []

"""README.md and docs/ are true where a program can tell: links, generated tables, recipes, the paths they name."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from pagedbatch.settings import OPTIONS

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
RECIPES = sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.toml"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
#: A file or folder of this repository in backquotes, from its root or from pagedbatch/.
FOLDERS = "|".join(path.name for root in (REPOSITORY, REPOSITORY / "pagedbatch") for path in root.glob("[a-z]*/"))
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page if not name else (page.parent / name).resolve()
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[good](#a-b) [gone](gone.md) [no heading](page.md#c) [web](https://example.org/x)\n")
    assert broken_links(page) == ["gone.md", "page.md#c"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    roots = (REPOSITORY, REPOSITORY / "pagedbatch")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert {page.name for page in (REPOSITORY / "docs").glob("*.md")} <= {
        Path(link).name for link in LINK.findall(text)
    }


def test_the_table_of_models_is_what_is_tested() -> None:
    script = REPOSITORY / "docs" / "make_models.py"
    spec = importlib.util.spec_from_file_location("make_models", script)
    assert spec is not None
    assert spec.loader is not None
    make_models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_models)
    text = make_models.PAGE.read_text(encoding="utf-8")
    assert text == make_models.page(text), "docs/models.md is out of date: run `make docs`"


def test_every_recipe_is_listed_and_has_a_make_target() -> None:
    planning = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `make ([a-z-]+)` \|", planning, flags=re.MULTILINE)
    targets = re.search(r"^RECIPES := (.*)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert targets is not None
    assert sorted(listed) == sorted(targets[1].split()) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_shows_and_has_only_known_settings(name: str) -> None:
    text = (REPOSITORY / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    settings = tomllib.loads(text)
    assert settings.keys() <= OPTIONS.keys()
    assert settings["output"] == f"out/{name}.jsonl"

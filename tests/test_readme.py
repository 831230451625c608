"""What README.md says about models and recipes is what the program has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from test_families import FAMILIES

from pagedbatch.settings import OPTIONS

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
RECIPES = sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.toml"))


#: Setting of a family's tiny config -> the feature of its attention or its layers that it switches on.
FEATURES = {
    "sliding_window": "sliding window",
    "attn_logit_softcapping": "soft cap",
    "num_experts": "experts",
    "attention_multiplier": "own scale",
    "query_pre_attn_scalar": "own scale",
    "no_rope_layers": "layers without positions",
}


def families_table() -> str:
    """The table of supported model families, as it must stand in README.md: those that `test_families` compares."""
    lines = ["| model type | also covered |", "| --- | --- |"]
    for family, settings in sorted(FAMILIES.items()):
        features = list(dict.fromkeys(FEATURES[name] for name in settings if name in FEATURES))
        if family == "gpt_oss":
            features.append("sinks")
        lines.append(f"| `{family}` | {', '.join(features)} |")
    return "\n".join(lines)


def test_the_families_table_is_what_is_tested() -> None:
    expected = families_table()
    assert expected in README, f"README.md needs this table:\n\n{expected}"


def test_every_recipe_is_listed_and_has_a_make_target() -> None:
    listed = re.findall(r"^\| `make ([a-z-]+)` \|", README, flags=re.MULTILINE)
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

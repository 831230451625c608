"""Settings: sizes, recipes, and the order in which command line, recipe and defaults count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedbatch.errors import UsageError
from pagedbatch.settings import OPTIONS, merge, read_recipe

NEEDED = {"input": "in.jsonl", "model": "M", "output": "out.jsonl"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1e9", 10**9),
        ("2G", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("0.1T", 10**11),
        ("64k", 64_000),
        ("100", 100),
        (" 7B ", 7),
        (4096, 4096),
        (1e6, 10**6),
        (0, 0),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert OPTIONS["kv_memory"].checked(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "4Gx", "four", "-1", "1..5G", "1e999999G", -1, True, None, float("inf"), []]
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(UsageError, match=r"^--kv-memory: .* is not a size: write 4GiB"):
        OPTIONS["kv_memory"].checked(text)


def _recipe(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "r.toml"
    path.write_text(text)
    return read_recipe(str(path))


def test_the_command_line_beats_the_recipe_and_that_the_default(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, 'model = "R"\ntemperature = 0.7\ntop-p = 0.9\nblock-size = 8\nchat = true\n')
    command_line = {**NEEDED, "temperature": 0.2, "top_p": None, "block_size": 32, "chat": False}
    settings = merge(command_line, recipe)
    assert (settings.model, settings.block_size, settings.chat, settings.max_num_seqs) == ("M", 32, False, 128)
    assert settings.generation == {"temperature": 0.2, "top_p": 0.9}
    origins = [settings.origin(name) for name in ("temperature", "top_p", "block_size", "max_num_seqs")]
    assert origins == ["command line", "recipe", "command line", "default"]


def test_the_stronger_layer_decides_between_two_ways_to_say_one_thing() -> None:
    settings = merge({**NEEDED, "num_blocks": 8}, {"kv_memory": "1GiB", "prompt_column": "q"})
    assert (settings.num_blocks, settings.kv_memory, settings.prompt_column) == (8, None, "q")
    assert settings.origin("kv_memory") == "default"
    with pytest.raises(UsageError, match="--kv-memory and --num-blocks can't be combined"):
        merge({**NEEDED, "num_blocks": 8, "kv_memory": "1GiB"}, {})
    with pytest.raises(UsageError, match="--prompt-column and --prompt-template can't be combined"):
        merge(NEEDED, {"prompt_column": "q", "prompt_template": "{q}"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("temprature = 1", "unknown key 'temprature': did you mean 'temperature'?"),
        ("zzz = 1", "unknown key 'zzz'"),
        ("recipe = 'x'", "unknown key 'recipe'"),
        ("top_p = 1\ntop-p = 1", "top_p is given twice"),
        ("a = ", "malformed TOML"),
    ],
)
def test_recipes_are_read_strictly(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        _recipe(tmp_path, text)
    assert reason in str(refused.value)
    assert str(tmp_path / "r.toml") in str(refused.value)


def test_recipes_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_recipe(str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="Is a directory"):
        read_recipe(str(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read_recipe(str(tmp_path / "latin.toml"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"block_size": 0}, "--block-size must be 1 or more, got 0"),
        ({"limit": True}, "--limit must be an integer, got True"),
        ({"chat": 1}, "--chat must be true or false, got 1"),
        ({"split": ""}, "--split must be a non-empty text"),
        ({"preemption": "none"}, "--preemption must be one of auto, swap, recompute, got 'none'"),
        ({"max_tokens": -1}, "max_tokens must be 0 or more, got -1"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"n": 2, "temperature": 0}, "n 2 with temperature 0"),
        ({"n": 3, "num_beams": 2}, "n 3 is above num_beams 2"),
        ({"model": None}, "--model is missing"),
        ({"input": None}, "INPUT is missing: the prompts"),
    ],
)
def test_wrong_values_are_refused_at_once(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        merge({**NEEDED, **given}, {})
    assert reason in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (0, "must be above 0, got 0"),
        (-1, "must be above 0, got -1"),
        (float("nan"), "must be a finite number, got nan"),
        (float("inf"), "must be a finite number, got inf"),
        (True, "must be a finite number, got True"),
        ("5", "must be a finite number, got '5'"),
        (86_401, "must be at most 86400, got 86401"),
    ],
)
def test_the_time_of_a_row_is_a_number_of_seconds(value: Any, reason: str) -> None:
    assert merge({**NEEDED, "row_prepare_timeout": 2}, {}).row_prepare_timeout == 2.0
    with pytest.raises(UsageError, match=f"^--row-prepare-timeout {reason}$"):
        merge({**NEEDED, "row_prepare_timeout": value}, {})


def test_an_old_spelling_still_works() -> None:
    assert merge({**NEEDED, "forward": "plain"}, {}).forward == merge({**NEEDED, "forward": "hf"}, {}).forward == "hf"


def test_what_a_manifest_holds() -> None:
    """Journals of earlier versions hold these names: a run that one of them began must find its own again."""
    plain = merge(NEEDED, {}).for_manifest()
    assert plain == {
        "split": None, "subset": None, "prompt_column": None, "prompt_template": None, "chat": False,
        "generation_config": "auto", "dtype": "auto", "trust_remote_code": False, "keep": (),
        "max_line_bytes": 64 * 2**20, "served_model_name": None, "chat_template_kwargs": None, "date": None,
    }  # fmt: skip
    later = {"max_model_len": 64, "ignore_adapter": True, "ignore_columns": ("n",)}
    assert merge({**NEEDED, **later}, {}).for_manifest() == plain | later

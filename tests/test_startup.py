"""What bringing up a run costs: what it imports, and how often it reads the model's config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_job import SilentView

from pagedbatch.model import model_defaults
from pagedbatch.run.job import run_job
from pagedbatch.settings import merge

#: What a plain run has no use for, of all that this project imports somewhere. What transformers brings along by itself
#: (torch._dynamo, triton, Pillow where it is installed) is not ours to leave out.
UNUSED = (
    "datasets", "gguf", "matplotlib", "pandas", "pyarrow", "ray", "xgrammar", "torch._inductor.compile_fx",
    "pagedbatch.constraints.catalog", "pagedbatch.constraints.grammar", "pagedbatch_kernels.triton_backend",
)  # fmt: skip


def run_and_list(folder: Path, names: tuple[str, ...], *flags: object) -> tuple[int, list[str]]:
    """The exit code of `pagedbatch run` on a row, in a process of its own, and which of `names` it imported."""
    (folder / "in.jsonl").write_text('{"prompt": "c"}\n')
    code = f"""
import json, sys
from pagedbatch.cli.app import main
try:
    main()
finally:
    print(json.dumps([name for name in {names!r} if name in sys.modules]))
"""
    command = [sys.executable, "-c", code, "run", "in.jsonl", "-o", "out.jsonl", *map(str, flags)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, cwd=folder, env=environment, stdout=-1, stderr=-1, check=False)
    return process.returncode, json.loads(process.stdout)


def test_a_run_imports_nothing_that_it_has_no_use_for(tmp_path: Path, rand_model_path: Path) -> None:
    used = ("torch", "transformers.modeling_utils")
    flags = ["-m", rand_model_path, "--max-tokens", 2, "--num-blocks", 64]
    assert run_and_list(tmp_path, (*UNUSED, *used), *flags) == (0, list(used))


def test_a_mistake_shows_before_what_only_the_weights_need_is_imported(tmp_path: Path, rand_model_path: Path) -> None:
    flags = ["-m", rand_model_path, "--stop-token-ids", 10**6]
    assert run_and_list(tmp_path, ("transformers.modeling_utils",), *flags) == (2, [])


def test_the_config_is_read_once(tmp_path: Path, rand_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load_config = model_defaults.load_config

    def count(model: str, **options: Any) -> Any:
        read.append(model)
        return load_config(model, **options)

    monkeypatch.setattr(model_defaults, "load_config", count)
    (tmp_path / "in.jsonl").write_text('{"prompt": "c"}\n')
    given = {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl"), "model": str(rand_model_path)}
    result = run_job(merge({**given, "max_tokens": 2, "num_blocks": 64}, {}), lambda *_: SilentView())
    assert result.exit_code == 0
    assert read == [str(rand_model_path)]

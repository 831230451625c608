"""A run that an earlier version broke off goes on in this one: its journal lies in `data/journal-0.1`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_job import SilentView, without_model

from pagedbatch.errors import UsageError
from pagedbatch.run.job import JobResult, Ui, run_job
from pagedbatch.settings import merge

STORED = Path(__file__).parent / "data" / "journal-0.1"

#: What that run was told.
GIVEN: dict[str, Any] = {
    "model": "none", "max_tokens": 5, "temperature": 1.0, "seed": 7, "top_p": 0.9, "stop": ["zz"],
    "logit_bias": {"97": 1.0}, "keep": ["meta.level"], "max_num_seqs": 2, "num_blocks": 50,
}  # fmt: skip


def _resume(folder: Path, told: list[str], **given: Any) -> JobResult:
    shutil.copytree(STORED, folder, dirs_exist_ok=True)
    paths = {"input": str(folder / "in.jsonl"), "output": str(folder / "out.jsonl")}
    with without_model():
        settings = merge({**GIVEN, **paths, **given}, {})
        return run_job(settings, Ui(notice=told.append, open_view=lambda *_: SilentView()))


def test_a_journal_of_an_earlier_version_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    told: list[str] = []
    result = _resume(tmp_path, told)
    assert result.exit_code == 3
    assert result.stats.rows.resumed == 4
    assert "resuming: 4 of 8 rows are finished already" in told
    assert (tmp_path / "out.jsonl").read_bytes() == (STORED / "expected.jsonl").read_bytes()


def test_what_differs_from_it_is_still_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"seed: was 7, now 8"):
        _resume(tmp_path, [], seed=8)

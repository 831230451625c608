"""A folder with an input and an output, and runs in it with a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from log_lines import log_lines

from pagedbatch.outputs import StepSnapshot
from pagedbatch.run.job import JobResult, run_job
from pagedbatch.settings import merge


@dataclass
class View:
    """A display that notes what it is told, and calls `on_update` with the rows done."""

    on_update: Callable[[int], None] = lambda rows_done: None
    notices: list[str] = field(default_factory=list)
    opened_with: tuple[int, int] | None = None
    rows_done: int = 0
    rows_error: int = 0

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(
        self, snapshot: StepSnapshot | None, rows_done: int, rows_error: int, pools: Sequence[StepSnapshot] = ()
    ) -> None:
        self.rows_done, self.rows_error = rows_done, rows_error
        self.on_update(rows_done)

    def open(self, total: int, resumed: int) -> View:
        self.opened_with = (total, resumed)
        return self


@dataclass
class Workplace:
    """A folder with an input and an output."""

    folder: Path
    model: Path

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def journal(self) -> Path:
        return self.folder / "out.jsonl.journal"

    @property
    def stats(self) -> Any:
        return json.loads((self.folder / "out.stats.json").read_text())

    def write(self, rows: list[Any]) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def run(self, view: View | None = None, **settings: Any) -> JobResult:
        view = view or View()
        given = {
            "input": str(self.folder / "in.jsonl"),
            "model": str(self.model),
            "output": str(self.output),
            "device": "cpu",
            "dtype": "float32",
            "num_blocks": 64,
            **settings,
        }
        with log_lines(view.notices):
            return run_job(merge(given, {}), view.open)

    def records(self) -> list[Any]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]


MIXED = [
    {
        "id": f"r{i}",
        "prompt": f"{'shared beginning of prompts ' * (i % 2)}{i}",
        **({}, {"n": 3, "temperature": 0.8}, {"num_beams": 3, "n": 2})[i % 3],
    }
    for i in range(24)
]


def run_rows(model: Path, folder: Path, rows: list[Any], **settings: Any) -> list[Any]:
    """The records of a run over `rows`, all of them answered."""
    place = Workplace(folder, model)
    place.write(rows)
    assert place.run(restart=True, **settings).exit_code == 0
    return place.records()

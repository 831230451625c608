"""A seeded sample of the settings of `beam_grid.py`, each model's in one run, equal to `generate`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from beam_grid import GRID, Setting, Subject

SAMPLE = random.Random(20).sample(GRID, 60)


def test_the_sample_holds_every_pair_of_values() -> None:
    """But for a few: what only shows in company of another value is looked for in its company."""
    names = Setting.__dataclass_fields__

    def pairs(settings: list[Setting]) -> set[tuple[str, object, str, object]]:
        return {(a, getattr(s, a), b, getattr(s, b)) for s in settings for a in names for b in names if a < b}

    assert len(pairs(SAMPLE)) > 0.95 * len(pairs(GRID))


@pytest.mark.parametrize(
    ("model", "subject"),
    [("tmp_path", Subject.table), ("rand_model_path", Subject.rand), ("stories_path", Subject.stories)],
)
def test_beams_equal_generate(request: pytest.FixtureRequest, model: str, subject: Callable[[Path], Subject]) -> None:
    assert subject(request.getfixturevalue(model)).differences(SAMPLE) == []

"""The numbers of random examples: few in an ordinary run, 40 times as many with HYPOTHESIS_PROFILE=thorough."""

from __future__ import annotations

import os

from hypothesis import settings

NUM_ORDINARY = 25
settings.register_profile("ordinary", max_examples=NUM_ORDINARY, deadline=None)  # a busy machine is no failure
settings.register_profile("thorough", max_examples=40 * NUM_ORDINARY, deadline=None)


def load_profile() -> None:
    """Before a test module is imported: `examples` and hypothesis's own default follow it."""
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ordinary"))


def examples(number: int) -> int:
    """For a test that takes other than the profile's number: `number` in an ordinary run."""
    return max(1, number * settings.default.max_examples // NUM_ORDINARY)

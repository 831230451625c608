"""What a constraint is to the engine: a state for each sequence, which knows the tokens that may come next.

The constraints themselves are in `constraints/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

#: The fields of a row that constrain its outputs; a row takes one of them.
CONSTRAINT_FIELDS = ("allowed_outputs", "json_schema", "regex", "grammar")


@dataclass(frozen=True, slots=True, eq=False)
class AllowedIds:
    """The tokens that may come next, listed: int64 [num_allowed]."""

    token_ids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class AllowedMask:
    """The tokens that may come next, as bits: int32 [ceil(vocab_size / 32)].

    Token t may come where bit t % 32 of word t // 32, counted from the lowest, is set.
    """

    words: np.ndarray


Allowed = AllowedIds | AllowedMask


class ConstraintState(Protocol):
    """How far one sequence has come. It belongs to that sequence alone: a fork gets a state of its own."""

    def allowed(self) -> Allowed | None:
        """What may come next; None: anything. End tokens are among it where the output may end here."""

    def advance(self, token_id: int) -> None:
        """Takes in a token that was allowed and ended nothing."""

    def fork(self) -> ConstraintState:
        """A copy of the state, for a sequence of its own."""


class Constraint(Protocol):
    """What every output of a request must obey."""

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that an output can have, its end token included; None: there is no limit."""

    def start(self) -> ConstraintState:
        """The state of a sequence that generated nothing yet."""

"""Stops a leak of Ray Data: its statistics of finished blocks, which grow with every group of a long run.

Ray Data keeps the statistics of each block until its dataset ends, for a summary that is not used here, and sends all
of them to an actor every ten seconds: https://github.com/ray-project/ray/issues/66016. There is no switch for it, but a
callback that it calls after each of its steps can empty the lists. They are private: if another version of Ray has none
by this name, nothing is done.
"""

from __future__ import annotations

from typing import Any

from ray.data._internal.execution.execution_callback import ExecutionCallback


class ClearBlockStats(ExecutionCallback):  # type: ignore[misc]
    """For `DataContext.custom_execution_callback_classes`; Ray Data makes the instance."""

    def on_execution_step(self, executor: Any) -> None:
        """Called by the only thread that adds to these lists."""
        for operator in getattr(executor, "_topology", None) or ():
            records = getattr(operator, "_output_blocks_stats", None)
            if isinstance(records, list):
                records.clear()

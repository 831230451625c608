"""Makes Ray Data forget the groups that are through, as the memory of a long run would grow with them. Knows no rows.

Ray Data keeps a record of each block until its dataset ends, for a summary that nobody here asks for, and sends all of
them to an actor every ten seconds: https://github.com/ray-project/ray/issues/66016. There is no switch for it. What it
calls after each of its steps may see the lists and empty them. They are Ray's own: where another Ray has none by this
name, nothing is done.
"""

from __future__ import annotations

from typing import Any

from ray.data._internal.execution.execution_callback import ExecutionCallback


class ForgetBlocks(ExecutionCallback):  # type: ignore[misc]
    """Ray Data makes it, for `DataContext.custom_execution_callback_classes`."""

    def on_execution_step(self, executor: Any) -> None:
        """Called in the one thread that adds to these lists."""
        for operator in getattr(executor, "_topology", None) or ():
            records = getattr(operator, "_output_blocks_stats", None)
            if isinstance(records, list):
                records.clear()

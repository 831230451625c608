"""Which test modules `pytest -m host` runs: they need no device library, and start no process that does."""

from __future__ import annotations

DEVICE_LIBRARIES = {"torch", "transformers", "triton", "accelerate", "gguf", "xgrammar", "datasets", "ray"}
_NAMES = """
    account admission baselines beam_search block_manager block_map block_pool breakdown catalog chat_messages
    cli_simulate columns compression demo_model engine formats groups isolation journal kept_columns ledger
    memory options params parquet philox placement planning prefetch prefix_cache printable progress queues
    ray_temp_dir rows_doc scheduler settings stall_watch stats_doc stats_merge stats_schema stopping
    stored_journal summary template_source thinking_budget trace trace_file verdicts wording
"""
HOST = frozenset(f"test_{name}" for name in _NAMES.split())

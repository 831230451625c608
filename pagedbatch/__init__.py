"""Offline batch inference over one paged KV pool. This module holds the version and imports nothing."""

__version__ = "0.1.0"

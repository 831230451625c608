"""Runs without a model: the real scheduler and pool on lengths alone."""

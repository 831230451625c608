"""Rows are prepared in a process of their own, which may be ended when a row takes too long."""

"""Rows are made ready in a process of their own, which can be ended when a row has no end."""

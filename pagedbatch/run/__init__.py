"""One run from end to end."""

"""Chat messages and chat templates."""

"""From files to requests: formats, rows, chat templates, tokens."""

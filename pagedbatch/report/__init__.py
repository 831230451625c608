"""The account of memory for people: terminal tables and an HTML page."""

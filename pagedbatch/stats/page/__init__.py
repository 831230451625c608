"""The account as one HTML page with pictures. Knows the stats' keys and matplotlib; no engine, no terminal."""

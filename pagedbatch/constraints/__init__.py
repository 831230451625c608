"""What outputs may be: catalogs, JSON schemas, regular expressions and grammars, as masks over tokens."""

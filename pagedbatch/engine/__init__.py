"""Host half: who runs, in which blocks, and what is next. Knows no torch, no tokenizer and no file."""

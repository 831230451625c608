"""Host half: scheduling, block tables, beam search. No torch."""

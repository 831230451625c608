"""Device half: a Hugging Face causal LM over the paged pool. Knows no scheduler, no row and no file."""

"""The device half: runs a Hugging Face causal LM on a paged KV cache."""

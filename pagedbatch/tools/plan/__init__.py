"""`pagedbatch plan`: what a run would need, from the input, the tokenizer and the model's config."""

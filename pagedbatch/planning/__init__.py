"""What a run would need, known before it: from the input, the tokenizer and the model's config."""

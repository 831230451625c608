"""`pagedbatch bench`: `pagedbatch run` and Hugging Face's `generate` on the same work, each in its own process."""

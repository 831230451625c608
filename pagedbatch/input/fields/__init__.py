"""What the keys of a row mean."""

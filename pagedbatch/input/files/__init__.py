"""File formats: each module yields the rows of one of them."""

"""What a run did and what its memory held: OUT.stats.json."""

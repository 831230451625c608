"""From finished requests to files: records, the journal, the output, the stats file."""

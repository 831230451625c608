"""The job: rows in, requests to the engine, records out."""

"""Many engines for one job, spread by Ray Data. `cluster` and `dataset` are all of this tool that imports ray."""

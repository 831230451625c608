"""Many engines for one run, spread by Ray Data. Only the ray_* modules import ray."""

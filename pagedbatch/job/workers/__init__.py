"""Many engines for one job, spread by Ray Data. `cluster`, `dataset`, `forgetting`: nothing else imports ray."""

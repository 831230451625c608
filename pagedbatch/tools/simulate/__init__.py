"""`pagedbatch simulate`: the real scheduler and pool on lengths alone, without a model."""

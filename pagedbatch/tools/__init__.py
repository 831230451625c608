"""Commands around a run: plan, simulate, bench. Only `cli` imports them."""

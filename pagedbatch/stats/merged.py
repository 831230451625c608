"""The accounts and states of several pools as one: workers side by side, and the lives of each one after another."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from pagedbatch.outputs import PoolCounts, StepSnapshot, add_counters
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.step import StepSeconds


def merge_accounts(workers: Sequence[Sequence[MemoryAccount]]) -> MemoryAccount:
    """One account of `workers`, each given as the accounts of its lives in order; see `MemoryAccount.stand_beside`."""
    accounts = []
    for lives in workers:
        if lives:
            account, *later = copy.deepcopy(list(lives))
            for each in later:
                account.follow(each)
            accounts.append(account)
    if not accounts:
        return MemoryAccount(num_blocks=0, block_size=1, block_bytes=0)
    first, *others = accounts
    if others:
        first.stand_beside(others)
    return first


def sum_snapshots(current: Sequence[StepSnapshot], past: Sequence[StepSnapshot]) -> StepSnapshot:
    """The state of several engines as one. Of those in `past`, which are gone, only the counters count."""
    pools = [each.pool for each in current]
    return StepSnapshot(
        step=sum(each.step for each in current),
        pool=PoolCounts(
            private=sum(pool.private for pool in pools),
            shared=sum(pool.shared for pool in pools),
            cached=sum(pool.cached for pool in pools),
            free=sum(pool.free for pool in pools),
            logical=sum(pool.logical for pool in pools),
            filled_slots=sum(pool.filled_slots for pool in pools),
            swapped=sum(pool.swapped for pool in pools),
        ),
        counters=add_counters([each.counters for each in (*current, *past)]),
        running_groups=sum(each.running_groups for each in current),
        running_sequences=sum(each.running_sequences for each in current),
        waiting_groups=sum(each.waiting_groups for each in current),
        num_tokens=sum(each.num_tokens for each in current),
        seconds=StepSeconds(
            model=sum(each.seconds.model for each in current),
            attention=sum(each.seconds.attention for each in current),
            sampling=sum(each.seconds.sampling for each in current),
            swap=sum(each.seconds.swap for each in current),
        ),
        host_seconds=sum(each.host_seconds for each in current),
        step_seconds=max(each.step_seconds for each in current),
    )

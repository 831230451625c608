"""Block tables against a memory of tokens: what a sequence reads back is always what it wrote."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedbatch.engine import prefix_cache
from pagedbatch.engine.block_manager import BlockManager
from pagedbatch.errors import BlockAccountingError
from pagedbatch.step import BlockCopy

Tokens = list[int]
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # few different ones: equal prefixes are frequent


@dataclass
class Group:
    """Sequences that are swapped as one."""

    key: int
    sequences: dict[int, Tokens] = field(default_factory=dict)
    is_swapped: bool = False


class Tables(RuleBasedStateMachine):
    """Random operations; the model is one list of tokens a sequence, and two memories of tokens, one a pool."""

    groups: list[Group]

    @initialize(block_size=st.integers(1, 4), num_blocks=st.integers(4, 24), cache=st.booleans())
    def start(self, block_size: int, num_blocks: int, cache: bool) -> None:
        self.block_size = block_size
        self.manager = BlockManager(num_blocks, block_size, num_swap_blocks=8, prefix_cache=cache)
        self.device: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[int | None]] = [[None] * block_size for _ in range(8)]
        self.groups = []
        self.next_id = 0

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def resident(self) -> list[Group]:
        return [group for group in self.groups if not group.is_swapped]

    def pick(self, data: st.DataObject) -> Group:
        return data.draw(st.sampled_from(self.resident()))

    def write(self, group: Group, growth: dict[int, Tokens]) -> None:
        """What a step does: ask for room, extend each table, copy, write, make full blocks findable."""
        starts = {seq_id: len(group.sequences[seq_id]) for seq_id in growth}
        spans = [(seq_id, starts[seq_id], starts[seq_id] + len(new)) for seq_id, new in growth.items()]
        before = self.manager.pool.num_available
        needed = self.manager.blocks_needed(spans)
        assert self.manager.pool.num_available == before, "asking changes nothing"
        if needed > before:
            return
        for seq_id, start, stop in spans:
            copy = self.manager.extend(seq_id, start, stop)
            if copy is not None:
                self.device[copy.dst] = list(self.device[copy.src])
            self.manager.check_writable(seq_id, start)
            history = group.sequences[seq_id]
            history += growth[seq_id]
            table = self.manager.block_table(seq_id)
            for position in range(start, stop):
                self.device[table[position // self.block_size]][position % self.block_size] = history[position]
            self.manager.cache_full_blocks(seq_id, stop, lambda a, b, tokens=history: tokens[a:b])  # type: ignore[misc]
        assert before - self.manager.pool.num_available == needed

    @rule(prompt=tokens)
    def open(self, prompt: Tokens) -> None:
        group, seq_id = Group(self.new_id()), self.new_id()
        root = self.manager.root_of(group.key)
        prefix = self.manager.match_prefix(root, prompt)
        found = len(prefix) * self.block_size
        assert found < len(prompt), "at least one token is left to compute"
        before, cost = self.manager.pool.num_available, self.manager.available_cost(prefix)
        self.manager.create_table(seq_id, root, prefix)
        assert before - self.manager.pool.num_available == cost
        group.sequences[seq_id] = prompt[:found]
        self.groups.append(group)
        self.write(group, {seq_id: prompt[found:]})

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), new=tokens)
    def extend(self, data: st.DataObject, new: Tokens) -> None:
        group = self.pick(data)
        self.write(group, {data.draw(st.sampled_from(sorted(group.sequences))): new})

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def extend_all(self, data: st.DataObject) -> None:
        """A decode step of a group: its sequences may all hold the same half-full block."""
        group = self.pick(data)
        self.write(group, {seq_id: [data.draw(st.integers(0, 1))] for seq_id in group.sequences})

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group, child = self.pick(data), self.new_id()
        parent = data.draw(st.sampled_from(sorted(group.sequences)))
        self.manager.fork(parent, child)
        assert self.manager.block_table(child) == self.manager.block_table(parent)
        group.sequences[child] = list(group.sequences[parent])

    @precondition(lambda self: any(len(group.sequences) > 1 for group in self.resident()))
    @rule(data=st.data())
    def replace_with_fork(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([group for group in self.resident() if len(group.sequences) > 1]))
        parent, dead = data.draw(st.permutations(sorted(group.sequences)))[:2]
        child, table = self.new_id(), list(self.manager.block_table(parent))
        self.manager.replace_with_fork(parent, child, dead)
        assert self.manager.block_table(child) == self.manager.block_table(parent) == table
        assert not self.manager.has_table(dead)
        group.sequences[child] = list(group.sequences[parent])
        del group.sequences[dead]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        group = self.pick(data)
        seq_id = data.draw(st.sampled_from(sorted(group.sequences)))
        self.manager.free(seq_id)
        assert not self.manager.has_table(seq_id)
        del group.sequences[seq_id]
        if not group.sequences:
            self.groups.remove(group)

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = self.pick(data)
        ids = sorted(group.sequences)
        distinct = {block for seq_id in ids for block in self.manager.block_table(seq_id)}
        assert self.manager.num_distinct_blocks(ids) == len(distinct)
        if len(distinct) > self.manager.swap_pool.num_available:
            return
        copies = self.manager.swap_out(ids)
        assert {copy.src for copy in copies} == distinct
        for device, host in copies:
            self.host[host] = list(self.device[device])
        group.is_swapped = True

    @precondition(lambda self: any(group.is_swapped for group in self.groups))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([group for group in self.groups if group.is_swapped]))
        before, cost = self.manager.pool.num_available, self.manager.swap_in_cost(sorted(group.sequences))
        if cost > before:
            return
        for host, device in self.manager.swap_in({seq_id: len(held) for seq_id, held in group.sequences.items()}):
            self.device[device] = list(self.host[host])
        assert before - self.manager.pool.num_available <= cost
        group.is_swapped = False

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for group in self.resident():
            for seq_id, held in group.sequences.items():
                table = self.manager.block_table(seq_id)
                assert len(table) == -(-len(held) // self.block_size)
                assert [self.device[table[p // self.block_size]][p % self.block_size] for p in range(len(held))] == held

    @invariant()
    def counts_are_those_of_a_recount(self) -> None:
        self.manager.check_integrity()
        owners: Counter[int] = Counter()
        filled: dict[int, int] = {}
        for group in self.resident():
            for seq_id, held in group.sequences.items():
                for index, block in enumerate(self.manager.block_table(seq_id)):
                    owners[block] += 1
                    filled[block] = min(self.block_size, len(held) - index * self.block_size)
        counts = self.manager.counts()
        assert counts.logical == owners.total()
        assert counts.live == len(owners)
        assert counts.shared == sum(count > 1 for count in owners.values())
        assert counts.filled_slots == sum(filled.values())
        assert counts.live + counts.cached + counts.free == len(self.device)
        assert self.manager.prefix_cache or counts.cached == 0


Tables.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=40, deadline=None)
TestTables = Tables.TestCase


def opened(manager: BlockManager, seq_id: int, prompt: Tokens, key: int = 0) -> int:
    """Opens a sequence, fills its table and returns how many tokens stood in the pool."""
    root = manager.root_of(key)
    prefix = manager.match_prefix(root, prompt)
    manager.create_table(seq_id, root, prefix)
    manager.extend(seq_id, len(prefix) * manager.block_size, len(prompt))
    manager.cache_full_blocks(seq_id, len(prompt), lambda start, stop: prompt[start:stop])
    return len(prefix) * manager.block_size


def test_a_half_full_block_is_copied_for_all_writers_but_the_last() -> None:
    manager = BlockManager(20, 4)
    opened(manager, 1, [1, 2, 3, 4, 5, 6])
    for child in (2, 3, 4):
        manager.fork(1, child)
    assert manager.blocks_needed([(seq_id, 6, 7) for seq_id in (1, 2, 3, 4)]) == 3
    assert manager.blocks_needed([(seq_id, 6, 7) for seq_id in (1, 2)]) == 2
    copies = [manager.extend(seq_id, 6, 7) for seq_id in (1, 2, 3, 4)]
    assert copies == [BlockCopy(1, 2), BlockCopy(1, 3), BlockCopy(1, 4), None]
    assert manager.block_table(4) == [0, 1]


def test_a_child_in_place_of_a_dead_sibling_that_holds_more_of_the_window() -> None:
    manager = BlockManager(20, 2)
    opened(manager, 1, [1, 2, 3, 4, 5])
    manager.fork(1, 2)
    manager.drop_before(1, 2)
    manager.replace_with_fork(1, 3, 2)
    manager.check_integrity()
    assert manager.block_table(3) == manager.block_table(1)


def test_writing_into_a_shared_block_is_noticed() -> None:
    manager = BlockManager(20, 4)
    opened(manager, 1, [1, 2, 3, 4, 5])
    manager.check_writable(1, 5)
    manager.fork(1, 2)
    with pytest.raises(BlockAccountingError, match=r"sequence 1 is about to write into shared blocks \[1\]"):
        manager.check_writable(1, 5)


@pytest.mark.parametrize("cache", [True, False])
def test_only_siblings_share_without_the_prefix_cache(cache: bool) -> None:
    manager = BlockManager(20, 2, prefix_cache=cache)
    prompt = [1, 2, 3, 4, 5]
    opened(manager, 1, prompt, key=1)
    assert opened(manager, 2, prompt, key=1) == 4
    assert opened(manager, 3, prompt, key=2) == (4 if cache else 0)
    for seq_id in (1, 2, 3):
        manager.free(seq_id)
    assert opened(manager, 4, prompt, key=1) == (4 if cache else 0)


def test_a_prefix_outlives_its_continuation() -> None:
    """Blocks are released last first, so that the first are given up last."""
    manager = BlockManager(4, 2)
    opened(manager, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    manager.free(1)
    opened(manager, 2, [9, 9, 9, 9])
    manager.free(2)
    assert opened(manager, 3, [1, 2, 3, 4, 5]) == 4


def test_swapping_shares_what_still_stands_and_copies_the_rest() -> None:
    manager = BlockManager(8, 2, num_swap_blocks=8)
    opened(manager, 1, [1, 2, 3, 4, 5])
    manager.fork(1, 2)
    assert len(manager.swap_out([1, 2])) == 3
    assert manager.counts().live == 0
    opened(manager, 3, [1, 2, 7])  # holds the first block live
    assert manager.swap_in_cost([1, 2]) == 2
    assert len(manager.swap_in({1: 5, 2: 5})) == 1  # the half-full one; the second block was still cached
    assert manager.block_table(1) == manager.block_table(2)
    assert manager.block_table(1)[0] == manager.block_table(3)[0]
    assert manager.swap_pool.num_live == 0


def test_nothing_after_a_collision_is_cached_or_confused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "hash", lambda key: 42, raising=False)
    manager = BlockManager(20, 2)
    assert opened(manager, 1, [1, 2, 3, 4, 5]) == 0
    assert opened(manager, 2, [6, 7, 8, 9, 5]) == 0
    assert opened(manager, 3, [1, 2, 8, 9, 5]) == 2
    assert opened(manager, 4, [6, 7, 8, 9, 5]) == 0
    manager.check_integrity()


@pytest.mark.parametrize("damage", ["owner", "logical", "filled"])
def test_the_integrity_check_notices_damage(damage: str) -> None:
    manager = BlockManager(8, 2)
    opened(manager, 1, [1, 2, 3])
    manager.check_integrity()
    if damage == "owner":
        manager.block_table(1)[0] = 1
    elif damage == "logical":
        manager._logical_blocks += 1
    else:
        manager._filled_slots -= 1
    with pytest.raises(BlockAccountingError):
        manager.check_integrity()

"""Decides which sequences compute which tokens in the next step, in which blocks.

One rule covers prefill, chunked prefill, decoding and resuming: a sequence wants the tokens whose K/V are missing; when
a step closes the gap of every sequence of a group, the group draws its next tokens. There are no phases.

Running groups are served from the head (lowest priority value, then oldest); while blocks are short, groups are
preempted from the tail. So nothing that a step has scheduled is ever undone, and the head always advances.
"""

from __future__ import annotations

from pagedbatch.config import EngineConfig
from pagedbatch.engine.admission import Admission, max_width, never_message
from pagedbatch.engine.block_manager import BlockManager
from pagedbatch.engine.preemption import Preemption
from pagedbatch.engine.prefix_cache import CachedBlock
from pagedbatch.engine.queues import Queues
from pagedbatch.engine.sources import SourceTables
from pagedbatch.engine.step_builder import StepBuilder
from pagedbatch.engine.stopping import StopChecker
from pagedbatch.engine.tasks import add_prompt_task, add_tasks
from pagedbatch.errors import EngineStalledError, PagedBatchError
from pagedbatch.outputs import EngineCounters
from pagedbatch.sequence import GroupState, Request, Sequence, SequenceGroup, Source
from pagedbatch.step import ScheduledSequence
from pagedbatch.wording import named


class Scheduler:
    """Queues, block tables and the decisions of each step."""

    def __init__(self, config: EngineConfig, stops: StopChecker) -> None:
        self.config = config
        self.stops = stops
        self.blocks = BlockManager(
            config.num_blocks, config.block_size, config.num_swap_blocks, prefix_cache=config.prefix_cache
        )
        self.sources = SourceTables(self.blocks)
        self.queues = Queues()
        self.counters = EngineCounters()
        self.preemption = Preemption(config.preemption, self.blocks, self.sources, self.queues, self.counters)
        #: Maximum number of tokens per step; smaller while a failed step is tried again in parts.
        self.max_num_tokens = config.max_num_batched_tokens
        self._num_arrivals = 0
        self._next_seq_id = 0

    @property
    def running(self) -> list[SequenceGroup]:
        """In serving order."""
        return self.queues.running

    @property
    def num_waiting(self) -> int:
        return self.queues.num_waiting

    @property
    def num_unfinished(self) -> int:
        return self.queues.num_unfinished

    @property
    def num_running_sequences(self) -> int:
        return sum(len(group.sequences) for group in self.running)

    def add(self, request: Request) -> None:
        """Queues a request. Its first sequence exists from now on; its siblings appear when it first draws."""
        group = SequenceGroup(request, self._num_arrivals, max_width(self.config, request.params))
        self._num_arrivals += 1
        seq = Sequence(self.new_seq_id(), group, 0)
        seq.constraint = None if request.constraint is None else request.constraint.start()
        group.sequences.append(seq)
        if request.source_token_ids:
            group.source = Source(self.new_seq_id(), request.source_token_ids)
        self.queues.enqueue(group)

    def new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id

    def retire(self, group: SequenceGroup) -> None:
        """Takes a finished group out and gives back what it still owns."""
        for seq in group.sequences:
            self.blocks.free(seq.seq_id)
        self.sources.free(group)
        group.sequences.clear()
        group.state = GroupState.FINISHED
        self.running.remove(group)

    # --- steps that failed ---------------------------------------------------------------------------------------

    def groups_in(self, builder: StepBuilder) -> list[SequenceGroup]:
        """The groups that compute something in a step, before it is applied."""
        in_step = {scheduled.seq_id for scheduled in builder.sequences}
        return [group for group in self.running if any(seq.seq_id in in_step for seq in group.sequences)]

    def roll_back(self, builder: StepBuilder) -> None:
        """Undoes a step that failed, whatever of it was done: no token was drawn, and all K/V it touched are lost.

        Who ran, or was to be swapped out in it, waits and computes again what it had.
        """
        for group in builder.swapped_out:
            for seq in group.sequences:
                self.blocks.free_swapped(seq.seq_id)
                seq.num_computed_tokens = 0
            if group.source is not None:
                self.blocks.free_swapped(group.source.seq_id)
            group.state = GroupState.WAITING
        self.start_again(list(self.running))

    def start_again(self, groups: list[SequenceGroup]) -> None:
        """Takes running groups back to the queue without their K/V; nor will they find any in the pool."""
        for group in groups:
            self.queues.stop(group)
            self.preemption.drop_blocks(group)
            self.queues.enqueue(group)
        self.forget_contents()

    def forget_contents(self) -> None:
        """Nobody finds K/V in the pool any more: every group that starts computes its own.

        A group that is half rebuilt starts again: its siblings would not find what they share.
        """
        self.blocks.forget_contents()
        half_built = [
            group
            for group in (*self.running, *self.queues.held)
            if not all(self.blocks.has_table(seq.seq_id) for seq in group.sequences)
        ]
        if half_built:
            self.start_again(half_built)

    def give_up(self, group: SequenceGroup) -> None:
        """Takes out a group that waits and holds nothing."""
        self.queues.withdraw(group)
        group.sequences.clear()
        group.state = GroupState.FINISHED

    def restrict_to(self, groups: list[SequenceGroup] | None, max_num_tokens: int) -> None:
        """Until the next call only these groups are scheduled, with at most `max_num_tokens` per step; None: all are.

        The others keep their blocks, as long as these don't need them.
        """
        self.queues.restrict_to(groups)
        self.max_num_tokens = max_num_tokens

    # --- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[StepBuilder, list[tuple[SequenceGroup, str]]]:
        """Builds a step.

        Returns:
            The builder, and the groups that can never run, each with the reason.

        Raises:
            EngineStalledError: work is left, but nothing can be scheduled.
        """
        widest_head = len(self.running[0].sequences) if self.running else 0
        builder = StepBuilder(
            tokens_left=max(self.max_num_tokens, widest_head),
            scores_left=self.config.max_num_scored_tokens,
        )
        self._serve_running(builder)
        rejected = self._admit(builder)
        if not builder.sequences and not rejected and self.num_unfinished:
            raise EngineStalledError(f"no sequence could be scheduled: {self.describe()}")
        return builder, rejected

    def describe(self) -> str:
        """The state in one line, for error messages."""
        states = ", ".join(f"{count} {state}" for state, count in self.blocks.counts().by_state.items())
        return (
            f"{len(self.running)} groups running ({self.num_running_sequences} sequences), {self.num_waiting} waiting; "
            f"blocks: {states}; "
            f"swap blocks free: {self.blocks.swap_pool.num_free}"
        )

    def _serve_running(self, builder: StepBuilder) -> None:
        served = 0
        while served < len(self.running) and builder.tokens_left > 0:
            self._serve(self.running[served], builder, first_victim=served + 1)
            served += 1

    def _serve(self, group: SequenceGroup, builder: StepBuilder, first_victim: int) -> None:
        """Gives a running group the tokens it misses, as far as budget and blocks reach."""
        if self.config.window is not None:
            self._drop_out_of_window(group, self.config.window)
        closes = self._closes_gap(group, builder)
        if not closes:
            before = builder.num_tokens
            self._catch_up(group, builder, first_victim)
            # Where all of it still stood in the pool nothing was caught up: without a draw the step could be empty.
            closes = builder.num_tokens == before and self._closes_gap(group, builder)
        if closes and self.preemption.make_room(self._blocks_to_grow(group), builder, first_victim):
            seq_indices = [self._schedule_tokens(seq, seq.num_tokens, builder) for seq in group.sequences]
            try:
                add_tasks(group, seq_indices, builder, self.stops)
            except PagedBatchError:
                raise
            except Exception as error:  # its constraint, or whatever else the row brought along
                group.error = f"its next token can't be asked for: {named(error)}"
                builder.broken.append(group)

    def _blocks_to_grow(self, group: SequenceGroup) -> int:
        """New blocks that the group takes to close its gap; if there are enough in any case, the maximum it can be."""
        maximum = group.num_missing_tokens  # a token takes a new block, a copy of a shared one, or neither
        if maximum <= self.blocks.pool.num_available:
            return maximum
        return self.blocks.blocks_needed([(s.seq_id, s.num_computed_tokens, s.num_tokens) for s in group.sequences])

    def _closes_gap(self, group: SequenceGroup, builder: StepBuilder) -> bool:
        """Whether the budget reaches for all that the group misses before it draws."""
        missing = group.num_missing_tokens
        if missing > builder.tokens_left or group.params.max_tokens == 0:
            return False
        if group.num_unscored and missing > self._tokens_at_most(group.sequences[0], builder):
            return False
        return all(self.blocks.has_table(seq.seq_id) for seq in group.sequences)

    def _drop_out_of_window(self, group: SequenceGroup, window: int) -> None:
        """Gives back the blocks that no token still to be computed can see."""
        for seq in group.sequences:
            if self.blocks.has_table(seq.seq_id):
                self.blocks.drop_before(seq.seq_id, seq.num_computed_tokens - window + 1)

    def _catch_up(self, group: SequenceGroup, builder: StepBuilder, first_victim: int) -> None:
        """Computes what fits of a gap too large for this step, or of a group that lost its blocks.

        Every sequence holds back its last token, so that siblings draw together once all have caught up. They go in
        order and a sequence starts only when those before it are through: it may share blocks that they fill.
        """
        for seq in group.sequences:
            if not self.blocks.has_table(seq.seq_id):
                self._create_table(seq)
            stop = min(seq.num_tokens - 1, seq.num_computed_tokens + self._tokens_at_most(seq, builder))
            if stop > seq.num_computed_tokens:
                needed = self.blocks.blocks_needed([(seq.seq_id, seq.num_computed_tokens, stop)])
                if not self.preemption.make_room(needed, builder, first_victim):
                    return
                self._schedule_tokens(seq, stop, builder)
            if stop < seq.num_tokens - 1:
                return

    def _tokens_at_most(self, seq: Sequence, builder: StepBuilder) -> int:
        """How many tokens of a sequence the budgets of the step still allow."""
        if seq.group.num_unscored <= builder.scores_left:
            return builder.tokens_left
        return min(builder.tokens_left, seq.group.num_scored + builder.scores_left - seq.num_computed_tokens)

    def _create_table(self, seq: Sequence) -> int:
        """Gives a sequence without blocks a table that begins with what is in the pool already.

        Returns:
            The number of tokens found.
        """
        prefix = self._find_prefix(seq)
        source = seq.group.source
        root, source_id = self.sources.root_of_sequences(seq.group), None if source is None else source.seq_id
        self.blocks.create_table(seq.seq_id, root, prefix, source_id)
        seq.num_computed_tokens = len(prefix) * self.config.block_size
        return seq.num_computed_tokens

    def _find_prefix(self, seq: Sequence) -> list[CachedBlock]:
        """The blocks of a sequence that are in the pool already.

        A prompt token that must still be scored is computed, although its K/V may be there.
        """
        group = seq.group
        prefix = self.blocks.match_prefix(self.sources.root_of_sequences(group), seq.token_slice(0, seq.num_tokens))
        return prefix[: group.num_scored // self.config.block_size] if group.num_unscored else prefix

    def _schedule_tokens(self, seq: Sequence, stop: int, builder: StepBuilder) -> int:
        """Schedules the missing tokens up to `stop`, for which there is room. Returns the index in the step."""
        start, seq_id = seq.num_computed_tokens, seq.seq_id
        copy = self.blocks.extend(seq_id, start, stop)
        if copy is not None:
            builder.copies.append(copy)
            self.counters.cow_copies += 1
        if self.config.check_invariants:
            self.blocks.check_writable(seq_id, start)
        self.blocks.cache_full_blocks(seq_id, stop, seq.token_slice)
        seq_index = builder.add(
            ScheduledSequence(seq_id, seq.token_slice(start, stop), start, self.blocks.block_table(seq_id))
        )
        self.sources.read(seq.group, seq_index, builder)
        if seq.group.num_unscored:
            add_prompt_task(seq.group, seq_index, start, stop, builder)
        if start < seq.peak_computed_tokens:
            self.counters.recomputed_tokens += min(stop, seq.peak_computed_tokens) - start
        seq.num_computed_tokens = stop
        if stop > seq.peak_computed_tokens:
            seq.peak_computed_tokens = stop
        return seq_index

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(self, builder: StepBuilder) -> list[tuple[SequenceGroup, str]]:
        """Starts groups from the head of the waiting queue, strictly in order: nobody overtakes."""
        rejected: list[tuple[SequenceGroup, str]] = []
        running = sum(group.width for group in self.running)
        while (group := self.queues.head) is not None and not builder.short_of_blocks:
            verdict = self._admission(group, running, builder)
            if verdict is Admission.LATER:
                break
            self.queues.pop()
            if verdict is Admission.NEVER:
                group.state = GroupState.FINISHED
                rejected.append((group, never_message(self.config, group) or ""))
            else:
                running += group.width
                self._start(group, builder)
        return rejected

    def _admission(self, group: SequenceGroup, running: int, builder: StepBuilder) -> Admission:
        """Asks what can be done with a waiting group while `running` sequences run. It changes nothing."""
        if never_message(self.config, group) is not None:
            return Admission.NEVER
        if not self.running:
            return Admission.OK  # alone, any group may run, however wide
        too_many = running + group.width > min(self.config.max_num_seqs, self.max_num_tokens)
        if too_many or builder.tokens_left < len(group.sequences):
            return Admission.LATER
        # Sources go whole: the first one of a step may take more tokens than are left.
        if builder.num_source_tokens:
            num_tokens = len(group.sequences) + self.sources.num_tokens_to_encode(group)
            if builder.tokens_left < num_tokens:
                return Admission.LATER
        # Half of the running sequences want a block within half a block's steps: taking the last blocks now would
        # only preempt what just started.
        if self._blocks_to_start(group) + running // 2 > self.blocks.pool.num_available:
            return Admission.LATER
        return Admission.OK

    def _blocks_to_start(self, group: SequenceGroup) -> int:
        """Available blocks that a group takes to come in, with a tail for each sequence of its final width."""
        if group.state is GroupState.SWAPPED:
            return self.blocks.swap_in_cost(list(self._swapped_lengths(group))) + len(group.sequences)
        if len(group.sequences) > 1:
            return group.num_blocks_lost + len(group.sequences)
        seq = group.sequences[0]
        prefix = self._find_prefix(seq)
        new_blocks = -(-seq.num_tokens // self.config.block_size) - len(prefix)
        new_blocks += self.sources.blocks_to_create(group)
        return new_blocks + self.blocks.available_cost(prefix) + group.max_width

    def _swapped_lengths(self, group: SequenceGroup) -> dict[int, int]:
        """How many tokens each table of a swapped group holds."""
        lengths = {seq.seq_id: seq.num_computed_tokens for seq in group.sequences}
        return lengths if group.source is None else lengths | {group.source.seq_id: len(group.source.token_ids)}

    def _start(self, group: SequenceGroup, builder: StepBuilder) -> None:
        if group.state is GroupState.SWAPPED:
            copies = self.blocks.swap_in(self._swapped_lengths(group))
            builder.swap_in += copies
            self.counters.swapped_in_blocks += len(copies)
        else:
            num_asked, num_found = self._create_tables(group, builder)
            if group.num_preemptions == 0:
                group.num_cached_tokens = num_found
                self.counters.prefix_queried_tokens += num_asked
                self.counters.prefix_hit_tokens += num_found
                self.counters.prompt_tokens += num_asked
        if not self.running:
            builder.tokens_left = max(builder.tokens_left, len(group.sequences))
        self.queues.run(group)
        self._serve(group, builder, first_victim=len(self.running))

    def _create_tables(self, group: SequenceGroup, builder: StepBuilder) -> tuple[int, int]:
        """Gives a group its source, and its first sequence a table; siblings get theirs when they catch up.

        Returns:
            The number of prompt tokens, or of a source's, and how many of them are in the pool already.
        """
        source, num_found = group.source, 0
        if source is not None:
            self.preemption.make_room(self.sources.blocks_to_create(group), builder, first_victim=len(self.running))
            if not self.sources.create(group, source):
                builder.tokens_left -= len(source.token_ids)
            builder.tokens_left = max(builder.tokens_left, len(group.sequences))
        if len(group.sequences) == 1:
            num_found = self._create_table(group.sequences[0])
        if source is not None:
            return len(source.token_ids), len(source.token_ids) if source.is_encoded else 0
        return len(group.prompt_token_ids), num_found

"""The map of who holds which blocks: numbering, bounds, when it is drawn, and what a real engine puts in it."""

from __future__ import annotations

from fake_runs import fake_engine, request

from pagedbatch.engine.block_map import MAX_BLOCKS_EACH, MAX_SEQUENCES, PeakMapper


def test_blocks_are_numbered_as_they_are_met() -> None:
    drawn = PeakMapper().draw(6, [(3, [70, 71, 9]), (3, [70, 71, 4]), (8, [-1, -1, 71, 5])], 3)
    assert [(each.request_id, each.num_blocks, each.runs) for each in drawn.held] == [
        (3, 3, [(0, 3)]),
        (3, 3, [(0, 2), (3, 1)]),
        (8, 4, [(-1, 2), (1, 1), (4, 1)]),
    ]


def test_a_map_is_bounded() -> None:
    tables = [(row, list(range(1000 * row, 1000 * row + 600))) for row in range(MAX_SEQUENCES + 5)]
    drawn = PeakMapper().draw(41400, tables, len(tables))
    assert len(drawn.held) == MAX_SEQUENCES
    assert drawn.num_sequences == MAX_SEQUENCES + 5
    assert drawn.held[0].num_blocks == 600
    assert sum(run.length for run in drawn.held[0].runs) == MAX_BLOCKS_EACH


def test_a_pool_that_grows_is_drawn_a_logarithmic_number_of_times() -> None:
    mapper = PeakMapper()
    drawn = []
    for live in [*range(10_000), 9_999, 5_000]:
        if mapper.wants(live):
            mapper.draw(live, [], 0)
            drawn.append(live)
    assert len(drawn) < 110
    assert drawn[0] == 1
    assert drawn[-1] > 9_999 / 1.1


def test_a_real_engine_draws_what_its_tables_hold() -> None:
    run = fake_engine(num_blocks=64, block_size=4)
    run.add(request(5, 8, n=3, max_tokens=6, ignore_eos=True))
    run.step()  # the prompt, by one sequence
    run.step()  # three samples, each with a tail of its own
    drawn = run.snapshots[-1].block_map
    assert drawn is not None
    assert (drawn.live_blocks, drawn.num_sequences) == (5, 3)
    assert [each.runs for each in drawn.held] == [[(0, 3)], [(0, 2), (3, 1)], [(0, 2), (4, 1)]]
    assert {each.request_id for each in drawn.held} == {5}
    run.step()
    assert run.snapshots[-1].block_map is None, "no more blocks than before"

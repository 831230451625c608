"""The ledger of the workers, called as they call it: whom it suspects, what it forgets, what it adds up. No Ray."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import snapshot

from pagedbatch.run.workers.ledger import MAX_FAILED_STARTS, MAX_TRIES, Failure, Ledger


@pytest.fixture
def ledger() -> Ledger:
    """Two workers are up."""
    ledger = Ledger()
    for worker in ("a", "b"):
        ledger.enroll(worker, f"machine of {worker}")
        ledger.ready(worker, {"num_blocks": 7})
    return ledger


def die(ledger: Ledger, worker: str) -> int:
    """The worker's next start, which is all that the ledger hears of a death."""
    return ledger.enroll(worker, "another machine")


def test_rows_of_a_dead_worker_are_suspected_and_those_of_a_living_one_forgotten(ledger: Ledger) -> None:
    assert ledger.begin("a", [1, 2]) == 1
    assert ledger.begin("b", [3]) == 1
    ledger.settle("b", [3])
    die(ledger, "a")
    assert [ledger.tries([row]) for row in (1, 2, 3)] == [1, 1, 0]
    assert ledger.tries([3, 1]) == 1
    assert ledger.tries([]) == 0


def test_a_row_has_so_many_tries_and_no_more(ledger: Ledger) -> None:
    tries = []
    for _ in range(MAX_TRIES + 1):
        tries.append(ledger.begin("a", [5]))
        die(ledger, "a")
    assert tries == [1, 2, 3, 4]
    assert ledger.histories()["a"].rows_again == MAX_TRIES - 1, "the last one was given up, not run"


def test_what_was_run_alone_and_lived_is_no_longer_suspect(ledger: Ledger) -> None:
    ledger.begin("a", [1, 2])
    die(ledger, "a")
    ledger.begin("b", [1])
    ledger.survived("b", [1])
    assert [ledger.tries([1]), ledger.tries([2])] == [1, 1], "back to where it was: the first death may be another's"
    ledger.settle("b", [1, 2])
    assert ledger.tries([1, 2]) == 0


def test_starts_in_vain_count_until_a_row_is_finished(ledger: Ledger) -> None:
    starts = [die(ledger, "a") for _ in range(MAX_FAILED_STARTS)]
    assert starts == [2, 3, 4, 5, 6, 7], "the start before the first death counts"
    ledger.settle("a", [1])
    assert die(ledger, "a") == 1


def test_giving_up_a_row_is_progress(ledger: Ledger) -> None:
    """A worker that meets one fatal row after the other is not broken."""
    for _ in range(MAX_TRIES):
        ledger.begin("a", [5])
        die(ledger, "a")
    assert ledger.begin("a", [5]) > MAX_TRIES
    assert die(ledger, "a") == 1


def test_the_overview_shows_the_living_and_keeps_what_the_dead_had_counted(ledger: Ledger) -> None:
    ledger.report("a", snapshot(3), b"account of a")
    ledger.report("b", snapshot(9), None)
    ledger.report("a", None, b"newer")
    assert {place: each.step for place, each in ledger.overview().pools.items()} == {0: 3, 1: 9}
    die(ledger, "a")
    seen = ledger.overview()
    assert {place: each.step for place, each in seen.pools.items()} == {1: 9}
    assert [each.step for each in seen.past] == [3]
    assert (seen.num_ready, seen.restarts) == (1, [1, 0])
    histories = ledger.histories()
    assert list(histories) == ["a", "b"]
    assert histories["a"].node == "another machine"
    assert [life.account for life in histories["a"].incarnations] == [b"newer", None]
    assert histories["b"].incarnations[0].used == {"num_blocks": 7}


def test_the_first_step_of_all_is_kept(ledger: Ledger) -> None:
    assert ledger.overview().first_step_at is None
    ledger.report("a", snapshot(1), None)
    first = ledger.overview().first_step_at
    ledger.report("b", snapshot(1), None)
    assert ledger.overview().first_step_at == first is not None


def test_the_first_failure_counts(ledger: Ledger) -> None:
    for message in ("no memory", "Ray is gone"):
        ledger.fail(Failure(message, is_usage=True))
    assert ledger.overview().failure == Failure("no memory", is_usage=True)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.sampled_from(["settle", "die"])), max_size=40))
def test_tries_are_the_deaths_since_a_row_was_last_settled(events: list[tuple[str, int, str]]) -> None:
    ledger = Ledger()
    for worker in "ab":
        ledger.enroll(worker, "here")
    deaths: Counter[int] = Counter()
    for worker, row, end in events:
        assert ledger.begin(worker, [row]) == deaths[row] + 1
        if end == "settle":
            ledger.settle(worker, [row])
            del deaths[row]
        else:
            die(ledger, worker)
            deaths[row] += 1
        assert ledger.tries([row]) == deaths[row]

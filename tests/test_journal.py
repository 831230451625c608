"""The journal: nothing that was finished is lost, nothing that was cut or damaged is believed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.errors import RunError, UsageError
from pagedbatch.job.journal import Journal, Manifest, seal, unseal
from pagedbatch.job.output import output_paths, write_atomically

MANIFEST = Manifest(
    input={"name": "in.jsonl", "fingerprint": "f00"},
    model="M",
    settings={"temperature": 0.5, "stop": ("a",), "dtype": "auto"},
    versions={"pagedbatch": "1"},
)


def _record(row: int) -> bytes:
    return json.dumps({"id": f"é\n{row}", "text": ', "journal": {"row": 9}}'}).encode()


def _open(output: str) -> Journal:
    paths = output_paths(output, "-")
    assert paths is not None
    return Journal.open(paths.journal, MANIFEST, num_rows=1)


def _fill(path: Path, rows: list[int], num_rows: int = 5) -> bytes:
    with Journal.open(path, MANIFEST, num_rows=num_rows) as journal:
        for row in rows:
            journal.append(row, _record(row), ok=row % 2 == 0)
    return path.read_bytes()


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open thousands of journals: no waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def test_records_come_back_in_input_order(tmp_path: Path) -> None:
    path = tmp_path / "j"
    _fill(path, [3, 0])
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert [row in journal for row in range(5)] == [True, False, False, True, False]
        assert (journal.num_resumed, journal.num_ok, journal.num_error) == (2, 1, 1)
        journal.append(1, _record(1), ok=False)
        journal.append(2, _record(2), ok=True)
        assert list(journal.records()) == [_record(row) + b"\n" for row in (0, 1, 2, 3)]
        assert (journal.num_resumed, journal.num_ok, journal.num_error) == (2, 2, 2)


def test_each_line_is_json_as_it_stands(tmp_path: Path) -> None:
    lines = _fill(tmp_path / "j", [0, 1]).splitlines()
    manifest, first, second = map(json.loads, lines)
    assert manifest["model"] == "M"
    assert {**json.loads(_record(0)), "journal": first["journal"]} == first
    assert (second["journal"]["row"], second["journal"]["ok"]) == (1, False)


@pytest.mark.usefixtures("unsynced")
def test_cut_anywhere_the_whole_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "j"
    rows = [4, 0, 2]
    data = _fill(path, rows)
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        whole = sum(end <= length for end in ends[1:])
        with Journal.open(path, MANIFEST, num_rows=5) as journal:
            assert [row for row in rows if row in journal] == rows[:whole]
            for row in range(5):
                if row not in journal:
                    journal.append(row, _record(row), ok=True)
            assert list(journal.records()) == [_record(row) + b"\n" for row in range(5)]


@pytest.mark.usefixtures("unsynced")
def test_a_changed_byte_is_never_believed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = _fill(path, [4, 0, 2])
    manifest_end = data.index(b"\n") + 1
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        if at < manifest_end:
            with pytest.raises(UsageError, match="pass --restart"):
                Journal.open(path, MANIFEST, num_rows=5)
            continue
        with Journal.open(path, MANIFEST, num_rows=5) as journal:
            assert journal.num_finished + journal.num_damaged >= 2
            assert set(journal.records()) <= {_record(row) + b"\n" for row in (0, 2, 4)}
            assert all(row in (0, 2, 4) for row in range(5) if row in journal)


@given(st.dictionaries(st.text(), st.text() | st.integers()), st.integers(0, 2**40), st.booleans())
def test_sealing_and_unsealing(record: dict[str, object], row: int, ok: bool) -> None:
    data = json.dumps(record, ensure_ascii=True).encode()
    if record:
        entry = unseal(seal(data, row=row, ok=ok))
        assert entry is not None
        assert (entry.record, entry.row, entry.ok) == (data, row, ok)


def test_other_settings_or_input_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j"
    before = _fill(path, [1])
    other = replace(MANIFEST, model="N", settings={"temperature": 0.7, "stop": ["a"], "dtype": "auto", "n": 2})
    with pytest.raises(UsageError) as refused:
        Journal.open(path, other, num_rows=5)
    assert "(model: was 'M', now 'N'; temperature: was 0.5, now 0.7; n: was None, now 2)" in str(refused.value)
    with pytest.raises(UsageError, match="input fingerprint: was 'f00', now 'f01'"):
        Journal.open(path, replace(MANIFEST, input={**MANIFEST.input, "fingerprint": "f01"}), num_rows=5)
    assert path.read_bytes() == before
    with Journal.open(path, other, num_rows=5, restart=True) as journal:
        assert journal.num_finished == 0


def test_other_versions_resume(tmp_path: Path) -> None:
    path = tmp_path / "j"
    _fill(path, [1])
    with Journal.open(path, replace(MANIFEST, versions={"pagedbatch": "2"}), num_rows=5) as journal:
        assert journal.num_resumed == 1
        assert journal.stored_versions == {"pagedbatch": "1"}


def test_rows_past_a_smaller_limit_wait(tmp_path: Path) -> None:
    path = tmp_path / "j"
    _fill(path, [4, 1])
    with Journal.open(path, MANIFEST, num_rows=2) as journal:
        assert list(journal.records()) == [_record(1) + b"\n"]
        assert journal.num_finished == 1
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert journal.num_finished == 2


def test_two_runs_cannot_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        journal.append(0, _record(0), ok=True)
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        assert b"BlockingIOError" in subprocess.run([sys.executable, "-c", code, path], capture_output=True).stderr
        with pytest.raises(UsageError, match="another run writes the same output"):
            Journal.open(path, MANIFEST, num_rows=5)
        assert 0 in journal


def test_an_empty_new_journal_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal.open(path, MANIFEST, num_rows=5).close()
    assert not path.exists()
    _fill(path, [0])
    Journal.open(path, MANIFEST, num_rows=5).close()
    assert path.exists()


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("my notes\n")
    with pytest.raises(UsageError, match="is not a journal that this version can resume"):
        Journal.open(path, MANIFEST, num_rows=5)
    assert path.read_text() == "my notes\n"


def test_a_full_disk_is_a_run_error_and_keeps_what_was_written(tmp_path: Path) -> None:
    with open("/dev/full", "r+b", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        full.write(b"x")  # what the next lines rely on
    path = tmp_path / "j"
    _fill(path, [0])
    journal = Journal.open(path, MANIFEST, num_rows=5)
    intact = journal._file
    journal._file = open("/dev/full", "r+b")  # noqa: SIM115 - closed by the journal
    with pytest.raises(RunError, match=r"can't write .*: No space left on device"):
        journal.append(1, _record(1), ok=True)
    assert 1 not in journal
    journal.close()
    intact.close()
    with Journal.open(path, MANIFEST, num_rows=5) as resumed:
        assert list(resumed.records()) == [_record(0) + b"\n"]


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def failing() -> object:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"can't write .*: No space left"):
        write_atomically(path, failing())
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("out", b"old")]
    write_atomically(path, [b"new", b"er"])
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("out", b"newer")]


def test_names_of_the_files_of_a_run(tmp_path: Path) -> None:
    paths = output_paths(str(tmp_path / "results.jsonl"), "-")
    assert paths is not None
    assert (paths.output.name, paths.stats.name, paths.journal.name) == (
        "results.jsonl",
        "results.stats.json",
        "results.jsonl.journal",
    )
    assert output_paths("-", "in.jsonl") is None


@pytest.mark.parametrize("own", ["x.jsonl", "x.stats.json", "x.jsonl.journal"])
def test_the_input_is_never_overwritten(tmp_path: Path, own: str) -> None:
    source = tmp_path / own
    source.write_text("{}")
    link = tmp_path / "link"
    link.symlink_to(source)
    for name in (source, link):
        with pytest.raises(UsageError, match="would overwrite the input"):
            output_paths(str(tmp_path / "x.jsonl"), str(name))


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    for output, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "x.jsonl", "does not exist: make it first"),
        (Path("/dev/null"), "is not a regular file: use --output -"),
        (Path("/proc/x.jsonl"), "can't (write|be written)"),
    ):
        with pytest.raises(UsageError, match=reason):
            _open(str(output))


def test_a_link_as_output_keeps_pointing_at_its_file(tmp_path: Path) -> None:
    target = tmp_path / "far" / "real.jsonl"
    target.parent.mkdir()
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    paths = output_paths(str(link), "-")
    assert paths is not None
    assert paths.output == target

"""Files that the command wrote itself, changed by hand or by the disk: refused in one line, never believed in part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_job import SilentView, without_model

from pagedbatch.errors import UsageError
from pagedbatch.fingerprint import Content
from pagedbatch.output.journal import Journal
from pagedbatch.output.journal_entry import seal, unseal
from pagedbatch.output.manifest import Manifest
from pagedbatch.output.paths import output_paths
from pagedbatch.run.job import run_job
from pagedbatch.settings import merge
from pagedbatch.stats.schema import ModelIdentity

MANIFEST = Manifest(
    Content("in", 3, ("f00",)), ModelIdentity(name="M", fingerprint="abc"), {"seed": 0}, {"pagedbatch": "1"}
)
STORED = MANIFEST.stored().to_json()
#: Journals that say nothing of their start are resumed: earlier versions left them.
NEEDED = [key for key in STORED if key != "started"]
NO_JOURNAL = "is not a journal that this version can resume: pass --restart to start over, or choose another --output"


def open_journal(path: Path, data: bytes) -> Journal:
    path.write_bytes(data)
    return Journal.open(path, MANIFEST, num_rows=5)


def line(stored: Any) -> bytes:
    return seal(json.dumps(stored).encode(), row=-1, ok=True)


@pytest.mark.parametrize(
    "broken",
    [
        *(pytest.param({name: STORED[name] for name in STORED if name != key}, id=f"no {key}") for key in NEEDED),
        *(STORED | {key: value} for key in NEEDED for value in (None, 7, "x", [], True)),
        *(STORED | {"started": value} for value in (7, [], True)),
        STORED | {"pagedbatch_journal": 3},
        STORED | {"input": STORED["input"] | {"size": -1}},
        STORED | {"input": STORED["input"] | {"chunks": [1]}},
        STORED | {"input": STORED["input"] | {"chunk_bytes": 1.5}},
        STORED | {"versions": {"torch": ["2"]}},
        {"pagedbatch_journal": 2},
    ],
)
def test_a_sealed_manifest_that_is_none_is_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=NO_JOURNAL):
        open_journal(tmp_path / "j", line(broken))
    assert (tmp_path / "j").read_bytes() == line(broken)


@pytest.mark.parametrize("record", [b"[]", b"7", b"{}", b"[" * 100_000, b'{"a": "\xff"}', b"{" + b"9" * 5000 + b"}"])
def test_a_first_line_of_anything_is_refused(tmp_path: Path, record: bytes) -> None:
    for row in (-1, 0, 2**70):
        with pytest.raises(UsageError, match=NO_JOURNAL):
            open_journal(tmp_path / "j", seal(record, row=row, ok=True))


@pytest.mark.parametrize(
    "trailer",
    ["7", "[]", "null", '{"row": 0.0, "ok": true, "crc32": "X"}', '{"row": true, "ok": 1, "crc32": "X"}',
     '{"row": 1e999, "ok": true, "crc32": "X"}', '{"row": 0, "ok": true, "crc32": 7}', "[" * 100_000],
)  # fmt: skip
def test_a_trailer_of_anything_is_no_entry(trailer: str) -> None:
    assert unseal(b'{"a": 1, "journal": ' + trailer.encode() + b"}\n") is None


def test_settings_that_differ_are_told_in_short(tmp_path: Path) -> None:
    stored = STORED | {"settings": {"seed": "x" * 10_000}}
    with pytest.raises(UsageError) as refused:
        open_journal(tmp_path / "j", line(stored))
    assert len(str(refused.value)) < 400


def test_the_way_out_of_damage_can_be_typed(tmp_path: Path) -> None:
    path = tmp_path / "it's; rm -rf x"
    record = seal(b'{"id": 0}', row=0, ok=True)
    with pytest.raises(UsageError) as refused:
        open_journal(path, MANIFEST.encode() + b"x\n" + record)
    command = str(refused.value).split("`")[1]
    assert os.system(command) == 0
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert journal.num_resumed == 0


class Tiny:
    """A run that was broken off, or finished with an error, to corrupt and to start again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input = folder / "in.jsonl"
        rows: list[dict[str, Any]] = [{"id": f"é{i}", "prompt": "ab"} for i in range(6)]
        rows[3]["max_tokens"] = 0.5
        self.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.start()
        self.output = (folder / "out.jsonl").read_bytes()
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "in.jsonl"}

    def start(self, **more: Any) -> None:
        given = {"input": str(self.input), "model": "M", "output": str(self.folder / "out.jsonl"), "max_tokens": 2}
        with without_model():
            run_job(merge(given | more, {}), lambda *_: SilentView())

    def refusal(self) -> str | None:
        """What a start is refused with; None if it ran."""
        try:
            self.start()
        except UsageError as error:
            return str(error)
        return None

    def restore(self, name: str, data: bytes) -> None:
        for path in self.folder.iterdir():
            if path.name != "in.jsonl":
                path.unlink()
        for own, was in (self.files | {name: data}).items():
            (self.folder / own).write_bytes(was)
        (self.folder / "out.jsonl").unlink()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@settings(max_examples=examples(30))
@given(st.data())
def test_any_corruption_is_refused_or_runs_to_the_same_output(tiny: Tiny, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["out.jsonl.finished", "out.stats.json"]))
    whole = tiny.files[name]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 40)) | st.just(len(whole)))
    put = data.draw(st.binary(max_size=3) | st.sampled_from([b"\n", b"null", b"[", b'"', whole[start:stop] * 2]))
    tiny.restore(name, whole[:start] + put + whole[stop:])
    refusal = tiny.refusal()
    if refusal is not None:
        assert len(refusal.splitlines()) == 1
        tiny.start(restart=True)
    assert (tiny.folder / "out.jsonl").read_bytes() == tiny.output


@pytest.mark.parametrize("suffix", ["", ".journal", ".finished"])
def test_a_folder_in_place_of_a_file_is_a_line(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"out.jsonl{suffix}").mkdir()
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    given = {"input": str(tmp_path / "in.jsonl"), "model": "M", "output": str(tmp_path / "out.jsonl"), "max_tokens": 1}
    with without_model(), pytest.raises(UsageError) as refused:
        run_job(merge(given, {}), lambda *_: SilentView())
    assert "folder" in str(refused.value) or "Is a directory" in str(refused.value)


@pytest.mark.parametrize("name", ["out.stats.json", "out.jsonl.tmp", "out.stats.json.tmp"])
def test_a_folder_in_place_of_a_file_that_is_written_at_the_end_is_told_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        output_paths(str(tmp_path / "out.jsonl"), "-")


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("suffix", ["", ".journal", ".finished", ".tmp"])
def test_an_output_that_is_the_input_by_a_link_is_refused(tmp_path: Path, link: Any, suffix: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    link(source, tmp_path / f"out.jsonl{suffix}")
    with pytest.raises(UsageError, match="would overwrite the input"):
        output_paths(str(tmp_path / "out.jsonl"), str(source))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/", "a\0b", "x" * 245, "x" * 300, "no/such/folder.jsonl", "in.jsonl/out.jsonl"]
)
def test_odd_names_are_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    with without_model(), pytest.raises(UsageError) as refused:
        run_job(
            merge({"input": "in.jsonl", "model": "M", "output": name}, {}),
            lambda *_: SilentView(),
        )
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a\0b.jsonl", "a\0b", "x" * 300 + ".jsonl", "x" * 5000])
def test_odd_inputs_are_a_line(tmp_path: Path, name: str) -> None:
    from pagedbatch.input.reader import open_source

    with pytest.raises(UsageError) as refused:
        open_source(name)
    assert len(str(refused.value).splitlines()) == 1

"""Fingerprints: an input that grew is told from one that changed, and a model from its fine-tuned sibling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedbatch.fingerprint import Content, file_content, model_fingerprint


def _content(path: Path, data: bytes, *, may_grow: bool = True, chunk_bytes: int = 4) -> Content:
    path.write_bytes(data)
    return file_content("in", path, may_grow=may_grow, chunk_bytes=chunk_bytes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([b"a\n", b"bb\n", b"\n", b"cccc\r\n"])), st.binary(max_size=9), st.integers(1, 7))
def test_what_is_appended_after_a_line_end_is_growth(
    tmp_path: Path, lines: list[bytes], added: bytes, chunk_bytes: int
) -> None:
    before = _content(tmp_path / "in", b"".join(lines), chunk_bytes=chunk_bytes).stored()
    assert _content(tmp_path / "in", b"".join(lines) + added, chunk_bytes=chunk_bytes).change_since(before) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=20), st.integers(0, 19), st.integers(1, 255), st.binary(max_size=9))
def test_a_changed_byte_is_never_growth(tmp_path: Path, data: bytes, at: int, flip: int, added: bytes) -> None:
    before = _content(tmp_path / "in", data + b"\n").stored()
    changed = bytearray(data + b"\n" + added)
    changed[at % len(data)] ^= flip
    change = _content(tmp_path / "in", bytes(changed)).change_since(before)
    start = at % len(data) // 4 * 4
    assert change == f"input: changed between byte {start} and byte {min(start + 4, len(data) + 1)}"


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (b"a\nb", b"a\nb\nc", None),
        (b"a\nb", b"a\nb\r\nc", None),
        (b"a\nb", b"a\nbc", "input: grew from 3 bytes, and what was added continues its last line"),
        (b"a\nb", b"a\nb\rc", "input: grew from 3 bytes, and what was added continues its last line"),
        (b"a\nb\n", b"a\n", "input: was 4 bytes, now 2"),
        (b"", b"a\n", None),
        (b"a\n", b"", "input: was 2 bytes, now 0"),
    ],
)
def test_where_a_row_ends(tmp_path: Path, before: bytes, after: bytes, change: str | None) -> None:
    stored = _content(tmp_path / "in", before).stored()
    assert _content(tmp_path / "in", after).change_since(json.loads(json.dumps(stored))) == change


def test_tables_and_compressed_files_cannot_grow(tmp_path: Path) -> None:
    before = _content(tmp_path / "in", b"a\n", may_grow=False)
    assert before.change_since(before.stored()) is None
    after = _content(tmp_path / "in", b"a\nb\n", may_grow=False)
    assert after.change_since(before.stored()) == "input: its content has changed"
    assert Content("x", 3, ("f",)).change_since(Content("y", 3, ("f",)).stored()) is None


def test_a_model_is_its_files_wherever_they_are(tmp_path: Path, table_model_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(table_model_path, model)
    original = model_fingerprint(str(table_model_path))
    assert model_fingerprint(str(model)) == original
    for name, change in (
        ("config.json", lambda data: data.replace(b"256", b"255", 1)),
        ("tokenizer.json", lambda data: data + b" "),
        ("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("model.safetensors", lambda data: data + b"\0"),
    ):
        path = model / name
        data = path.read_bytes()
        path.write_bytes(change(data))
        assert model_fingerprint(str(model)) != original
        path.write_bytes(data)
    assert model_fingerprint(str(model)) == original
    (model / "notes.md").write_text("mine")
    assert model_fingerprint(str(model)) == original


def test_large_weights_are_sampled_all_over(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3 << 20))
    original = model_fingerprint(str(path))
    for at in (0, 1 << 19, 2 << 20, (3 << 20) - 1):
        data = bytearray(3 << 20)
        data[max(0, at - 40_000) : at + 40_000] = b"\1" * len(data[max(0, at - 40_000) : at + 40_000])
        path.write_bytes(data)
        assert model_fingerprint(str(path)) != original

"""Decompression: in bounded pieces, whatever the file says; frames of every kind; cut, damaged and hostile files."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedbatch.input.files import zstd
from pagedbatch.input.files.compression import open_stream
from pagedbatch.input.reader import ReadOptions, open_source

_SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
_MIB = 1 << 20


def read(folder: Path, data: bytes) -> bytes:
    path = folder / "file"
    path.write_bytes(data)
    with open_stream(path) as stream:
        return stream.read()


def compressed(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def streamed(data: bytes) -> bytes:
    """A frame that does not say how much it holds."""
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize("data", [b"", b"a", b"ab" * 150, b"x" * 400_000, os.urandom(400_000)], ids=len)
def test_frames_of_every_kind(tmp_path: Path, data: bytes) -> None:
    for checksum in (True, False):
        for size in (True, False):
            assert read(tmp_path, compressed(data, write_checksum=checksum, write_content_size=size)) == data
    several = compressed(data) + _SKIPPABLE + streamed(data) + compressed(data)
    assert read(tmp_path, several) == data * 3
    assert read(tmp_path, _SKIPPABLE + several) == data * 3


@settings(max_examples=examples(15))
@given(st.lists(st.binary(max_size=20), max_size=5), st.data())
def test_a_cut_file_is_never_taken_for_a_whole_one(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], draw: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    frames = [compressed(part) for part in [*parts, b"last"]]
    whole = b"".join(frames)
    ends = {sum(map(len, frames[:count])) for count in range(len(frames) + 1)}
    cut = draw.draw(st.integers(4, len(whole)))
    if cut in ends:
        assert b"".join([*parts, b"last"]).startswith(read(folder, whole[:cut]))
    else:
        with pytest.raises(EOFError, match="ended before the end of its frame"):
            read(folder, whole[:cut])


@pytest.mark.parametrize(
    "compress",
    [gzip.compress, zstandard.compress, streamed],
)
def test_a_small_file_that_holds_much_is_read_a_piece_at_a_time(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(compress(b'{"prompt": "' + b"x" * (16 * _MIB) + b'"}\n{"prompt": "b"}\n'))
    source = open_source(str(path), ReadOptions(max_line_bytes=1000))
    tracemalloc.start()
    rows = list(source.rows())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * _MIB
    assert [row.error for row in rows] == ["line 1: longer than 1000 bytes (--max-line-bytes)", None]


def test_no_piece_is_larger_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zst"
    path.write_bytes(zstandard.compress(bytes(32 * _MIB)))
    reader = zstd.ZstdReader(path.open("rb"), path)
    buffer = bytearray(_MIB)
    sizes = []
    while size := reader.readinto(buffer):
        sizes.append(size)
    assert sum(sizes) == 32 * _MIB
    assert max(sizes) <= 1 << 17


def test_each_byte_of_the_input_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "in.zst"
    path.write_bytes(b"".join(compressed(b"%d\n" % i) for i in range(5000)))
    taken = []

    class Watched:
        def __init__(self) -> None:
            self._file = path.open("rb")

        def read(self, size: int) -> bytes:
            taken.append(size)
            return self._file.read(size)

        def close(self) -> None:
            self._file.close()

    with zstd.ZstdReader(Watched(), path) as reader:  # type: ignore[arg-type]
        assert reader.readall() == b"".join(b"%d\n" % i for i in range(5000))
    assert sum(taken) == path.stat().st_size + 4  # and looks for another frame


def test_a_window_that_is_too_large_is_told_in_words(tmp_path: Path) -> None:
    params = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=params).compressobj()
    data = compressor.compress(b"x") + compressor.flush()
    with pytest.raises(OSError, match=r"its zstd window of 256 MiB is larger than 128 MiB: .* without --long"):
        read(tmp_path, data)


@pytest.mark.parametrize("tail", [b"garbage!", b"\x51\x2a", _SKIPPABLE[:-1]])
def test_what_follows_a_frame_is_no_part_of_it(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(compressed(b'{"prompt": "a"}\n') + tail)
    rows = list(open_source(str(path)).rows())
    assert rows[0].fields == {"prompt": "a"}
    assert "the input breaks off here: " in str(rows[1].error)


def test_damage_gives_the_rows_before_it(tmp_path: Path) -> None:
    lines = b"".join(b'{"prompt": "%d"}\n' % (i * 7919 % 100_003) for i in range(60_000))
    data = bytearray(streamed(lines))
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    *whole, last = open_source(str(path)).rows()
    assert len(whole) > 1000
    assert all(row.error is None for row in whole)
    assert "the input breaks off here: " in str(last.error)

"""Gives weights that are views of a mapped checkpoint a mapping each, so that they can be released one by one.

transformers maps a safetensors file as a whole, and every weight is a view of that mapping: pages that were read stay
resident until the last weight is released. The pages of a weight's own mapping go with that weight.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class MappedFile:
    """Addresses [start, stop) of this process, at which a file is mapped from the byte `offset` on."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str

    def holds(self, tensor: Tensor) -> bool:
        return self.start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= self.stop

    def mapped_separately(self, tensor: Tensor) -> Tensor | None:
        """The same tensor in a mapping of its own; None if the file was replaced."""
        begin = self.offset + tensor.data_ptr() - self.start
        aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError:
            return None
        try:
            if os.fstat(file).st_ino != self.inode:
                return None
            length = begin - aligned + tensor.nbytes
            # torch wants a writable buffer; what is written to a private mapping does not reach the file.
            pages = mmap.mmap(file, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=aligned)
        finally:
            os.close(file)
        alone = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=begin - aligned)
        return alone.view(tensor.shape)


def map_separately(parameters: Iterable[nn.Parameter]) -> None:
    """Gives each parameter that lies in a mapped file a mapping of its own. Others stay as they are, as do all on
    systems without /proc/self/maps."""
    files = _mapped_files()
    for parameter in parameters:
        weight = parameter.data
        if weight.device.type != "cpu" or not weight.is_contiguous() or not weight.numel():
            continue
        alone = next((file.mapped_separately(weight) for file in files if file.holds(weight)), None)
        if alone is not None:
            parameter.data = alone


def _mapped_files() -> list[MappedFile]:
    """The files mapped into this process (proc(5)), the largest first, as those are likely to hold weights."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
        if path and int(inode):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            found.append(MappedFile(start, stop, int(offset, 16), int(inode), path[0]))
    return sorted(found, key=lambda file: file.start - file.stop)

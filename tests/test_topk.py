"""`largest` and `first_largest` against torch's own, for sizes around their spans."""

from __future__ import annotations

import pytest
import torch

from pagedbatch.model.topk import first_largest, largest

SIZES = [1, 5, 31, 32, 33, 64, 300, 5000, 50257]


@pytest.mark.parametrize("size", SIZES)
def test_largest_equals_topk(size: int) -> None:
    values = torch.randn(6, size, generator=torch.Generator().manual_seed(size))
    for count in (0, 1, 2, 8, 128, 2000):
        if count <= size:
            found, indices = largest(values, count)
            assert torch.equal(found, values.topk(count).values)
            assert torch.equal(indices, values.topk(count).indices)


@pytest.mark.parametrize("size", SIZES)
def test_largest_of_equals_are_different_entries(size: int) -> None:
    values = torch.zeros(2, size)
    count = min(size, 40)
    found, indices = largest(values, count)
    assert (found == 0).all()
    assert all(len(set(row)) == count and max(row) < size for row in indices.tolist())


@pytest.mark.parametrize("size", SIZES)
def test_first_largest_is_the_first_of_equals(size: int) -> None:
    values = torch.randn(50, size, generator=torch.Generator().manual_seed(size)).round()
    assert first_largest(values).tolist() == [row.index(max(row)) for row in values.tolist()]

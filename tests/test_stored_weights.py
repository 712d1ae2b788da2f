"""Weights that graphs share: a wrong byte is a wrong model, a second copy is memory that was to be saved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgap.stored_weights import BLOB, StoredWeights, add


def test_a_tensor_comes_back_as_it_was_and_is_kept_once(tmp_path):
    weight = torch.randn(6, 8).bfloat16()
    first = add(tmp_path, {"a": weight, "transposed": weight.T})
    size = (tmp_path / BLOB).stat().st_size
    second = add(tmp_path, {"b": weight.clone(), "codes": torch.arange(12, dtype=torch.uint8)})
    assert second["b"] == first["a"] != first["transposed"]
    assert (tmp_path / BLOB).stat().st_size <= size + 64 + 12
    store = StoredWeights(tmp_path)
    assert torch.equal(store.tensor(first["a"]), weight)
    back = store.tensor(first["transposed"])
    assert back.stride() == weight.T.stride()
    assert torch.equal(back, weight.T)
    assert store.tensor(second["b"]) is store.tensor(first["a"])
    assert store.bytes == 2 * weight.numel() * 2
    store.keep({first["a"]})
    assert store.bytes == weight.numel() * 2


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]),
)
def test_any_layout_survives(tmp_path_factory, shape, dtype):
    at = tmp_path_factory.mktemp("store")
    tensor = (torch.rand(shape) * 7).to(dtype)
    views = {"whole": tensor, "reversed": tensor.permute(tuple(reversed(range(tensor.dim()))))}
    names = add(at, views)
    store = StoredWeights(at)
    for name, view in views.items():
        assert torch.equal(store.tensor(names[name]), view)
        assert store.tensor(names[name]).dtype == dtype


def test_a_store_cut_short_is_named(tmp_path):
    names = add(tmp_path, {"a": torch.ones(100)})
    with (tmp_path / BLOB).open("r+b") as blob:
        blob.truncate(80)
    with pytest.raises(OSError, match=r"weights.bin is cut short"):
        StoredWeights(tmp_path).tensor(names["a"])

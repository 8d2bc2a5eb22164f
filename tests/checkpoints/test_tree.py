"""Trees of tensors and scalars survive a round trip bit for bit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from flow_factory.checkpoints import values
from flow_factory.checkpoints.tree import load_tree, save_tree
from flow_factory.errors import InputError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8),
        b.contiguous().reshape(-1).view(torch.uint8),
    )


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).bool()
    raw = torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)], ids=str)
def test_every_dtype_and_shape_keeps_its_bits(tmp_path, dtype, shape):
    tensor = random_bits(dtype, shape)
    save_tree(tmp_path, "part", {"t": tensor})
    assert same_bits(load_tree(tmp_path, "part")["t"], tensor)


def test_nan_payloads_and_signed_zeros_of_tensors_survive(tmp_path):
    bits = torch.tensor([0x7FC00001, 0x7F800001, -(2**31), 0x7F800000], dtype=torch.int32)
    save_tree(tmp_path, "part", bits.view(torch.float32))
    assert torch.equal(load_tree(tmp_path, "part").view(torch.int32), bits)


def test_scalars_structure_and_odd_keys_are_exact(tmp_path):
    tree = {
        "big": 2**53 + 1,
        "huge": -(10**40),
        "third": 1 / 3,
        "tiny": 5e-324,
        "zero": -0.0,
        "inf": [math.inf, -math.inf],
        "flags": [True, False, None, 0, 1, 0.0, 1.0],
        "pair": (0.9, 0.999),
        "empty": [{}, [], ()],
        "$tensor": "a key that looks like a tag",
        "": "empty key",
        "a/b": {"c": "slash"},
        "text": "ü — 红色 \u2028 \x00",
        3: {("x", 1): "keys that are not strings"},
    }
    save_tree(tmp_path, "part", tree)
    loaded = load_tree(tmp_path, "part")
    assert loaded == tree
    assert repr(loaded) == repr(tree)  # == cannot tell True from 1 or -0.0 from 0.0
    assert not (tmp_path / "part.safetensors").exists()
    save_tree(tmp_path, "nan", [math.nan])
    assert math.isnan(load_tree(tmp_path, "nan")[0])


def test_files_are_valid_strict_json(tmp_path):
    save_tree(tmp_path, "part", {"a": math.nan, "b": math.inf, "c": torch.tensor(math.nan)})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads((tmp_path / "part.json").read_text(), parse_constant=refuse)


def test_views_shared_and_colliding_tensors(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    tree = {
        "whole": base,
        "row": base[1],
        "column": base[:, 1],
        "transposed": base.T,
        "again": base,
        "parameter": parameter,
        "expanded": torch.ones(1).expand(5),
        "a": {"b": torch.tensor(1)},
        "a/b": torch.tensor(2),
    }
    save_tree(tmp_path, "part", tree)
    loaded = load_tree(tmp_path, "part")
    for key in ("whole", "row", "column", "transposed", "again", "expanded"):
        assert torch.equal(loaded[key], tree[key]), key
    assert torch.equal(loaded["parameter"], parameter.detach())
    assert (loaded["a"]["b"].item(), loaded["a/b"].item()) == (1, 2)


@pytest.mark.parametrize(
    "leaf", [object(), np.float64(1.0), b"bytes", {1, 2}, torch.float32], ids=lambda v: str(type(v))
)
def test_a_leaf_without_an_exact_form_is_refused_with_its_place(tmp_path, leaf):
    with pytest.raises(TypeError, match=r"part/state/0/x"):
        save_tree(tmp_path, "part", {"state": [{"x": leaf}]})


def test_damaged_files_are_named(tmp_path):
    save_tree(tmp_path, "part", {"t": torch.ones(3)})
    with pytest.raises(InputError, match=r"other\.json"):
        load_tree(tmp_path, "other")
    whole = (tmp_path / "part.safetensors").read_bytes()
    (tmp_path / "part.safetensors").write_bytes(whole[:-4])
    with pytest.raises(InputError, match=r"part\.safetensors"):
        load_tree(tmp_path, "part")
    (tmp_path / "part.safetensors").unlink()
    with pytest.raises(InputError, match=r"part\.safetensors"):
        load_tree(tmp_path, "part")
    (tmp_path / "part.json").write_text("{")
    with pytest.raises(InputError, match=r"part\.json"):
        load_tree(tmp_path, "part")


def test_unknown_tags_are_refused():
    with pytest.raises(ValueError, match="pickle"):
        values.decode({"$pickle": "gASVBQ=="})

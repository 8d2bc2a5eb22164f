"""Which numbers are held and computed in which dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flow_factory.errors import InputError
from flow_factory.models.components import DtypePolicy, autocast_dtype
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from tests.models.support import make_adapter, stir
from tests.models.test_variants import velocity

CPU = torch.device("cpu")


def compute_dtypes(adapter: SD3_5Adapter) -> set[torch.dtype]:
    """Output dtypes of the transformer's linear layers in one forward."""
    seen: set[torch.dtype] = set()
    hooks = [
        m.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        for m in adapter.pipeline.transformer.modules()
        if isinstance(m, nn.Linear)
    ]
    velocity(adapter)
    for hook in hooks:
        hook.remove()
    return seen


def dtypes(module: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters()}


def test_no_means_no_autocast(tiny_sd3_dir: Path) -> None:
    """Pitfall 57: `mixed_precision: no` still autocasts to bf16, LoRA weights bf16 whatever it says."""
    adapter = make_adapter(tiny_sd3_dir, {"mixed_precision": "no"})
    assert compute_dtypes(adapter) == {torch.float32}
    assert {p.dtype for p in adapter.trainable_parameters().values()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute_dtypes(adapter) == {torch.float32}, (
            "a surrounding autocast does not overrule the run's precision"
        )


def test_bf16_keeps_fp32_masters_and_an_fp32_vae(tiny_sd3_dir: Path) -> None:
    adapter = make_adapter(tiny_sd3_dir, {"mixed_precision": "bf16"})
    assert {p.dtype for p in adapter.trainable_parameters().values()} == {torch.float32}
    frozen = {p.dtype for p in adapter.pipeline.transformer.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    assert dtypes(adapter.pipeline.text_encoder) == {torch.bfloat16}
    assert dtypes(adapter.pipeline.vae) == {torch.float32}
    assert compute_dtypes(adapter) <= {torch.bfloat16, torch.float32} and torch.bfloat16 in compute_dtypes(adapter)
    assert velocity(adapter).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_full_training_in_bf16_keeps_fp32_masters(tiny_sd3_dir: Path) -> None:
    adapter = make_adapter(tiny_sd3_dir, {"mixed_precision": "bf16", "model.finetune_type": "full"})
    assert dtypes(adapter.pipeline.transformer) == {torch.float32}
    assert dtypes(adapter.pipeline.text_encoder_2) == {torch.bfloat16}
    assert torch.bfloat16 in compute_dtypes(adapter)


def test_frozen_bf16_without_autocast(tiny_sd3_dir: Path) -> None:
    adapter = make_adapter(
        tiny_sd3_dir, {"mixed_precision": "no", "model.frozen_parameters_dtype": {"transformer": "bf16"}}
    )
    stir(adapter)
    assert dtypes(adapter.pipeline.text_encoder) == {torch.float32}
    out = velocity(adapter)
    assert out.dtype == torch.float32 and bool(torch.isfinite(out).all())
    out.sum().backward()


@pytest.mark.parametrize("finetune", ["lora", "full"])
def test_swapped_weights_are_seen_inside_an_outer_autocast(tiny_sd3_dir: Path, finetune: str) -> None:
    """Pitfall 4: autocast around the whole loop caches stale low-precision weights."""
    adapter = make_adapter(tiny_sd3_dir, {"mixed_precision": "bf16", "model.finetune_type": finetune})
    stir(adapter)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = velocity(adapter)
        stir(adapter, seed=6)
        second = velocity(adapter)
    assert not torch.equal(first, second)
    assert torch.equal(second, velocity(adapter))


def test_load_dtype_differs_from_the_held_dtype(tiny_sd3_dir: Path) -> None:
    adapter = make_adapter(tiny_sd3_dir, {"model.component_load_dtypes": {"text_encoder": "bf16"}})
    assert dtypes(adapter.pipeline.text_encoder) == {torch.float32}
    weights = adapter.pipeline.text_encoder.text_projection.weight
    assert torch.equal(weights, weights.bfloat16().float())


def test_dtype_policy() -> None:
    policy = DtypePolicy.from_fields("fp32", None, torch.bfloat16)
    assert policy.of("transformer", trained_in_full=True) == torch.float32
    assert policy.of("transformer", trained_in_full=False) == torch.bfloat16
    for decoder in ("vae", "audio_vae", "vocoder"):  # of pictures, videos and sounds
        assert policy.of(decoder, trained_in_full=False) == torch.float32
    assert DtypePolicy.from_fields("bf16", "fp16", None).of("vae", trained_in_full=False) == torch.float16
    assert DtypePolicy.from_fields("bf16", "fp16", None).trainable == torch.bfloat16
    mapped = DtypePolicy.from_fields("fp32", {"default": "bf16", "vae": "fp16"}, None)
    assert mapped.of("text_encoder", trained_in_full=False) == torch.bfloat16
    assert mapped.of("vae", trained_in_full=False) == torch.float16
    with pytest.raises(InputError, match="frozen_parameters_dtype"):
        DtypePolicy.from_fields("fp32", "fp8", None)


def test_autocast_dtype() -> None:
    assert autocast_dtype("no", CPU) is None
    assert autocast_dtype("auto", CPU) is None
    assert autocast_dtype("bf16", CPU) == torch.bfloat16
    with pytest.raises(InputError, match="fp8"):
        autocast_dtype("fp8", CPU)


def test_weights_on_cpu_are_aligned(fresh: SD3_5Adapter) -> None:
    """Unaligned operands change the last bits of a matrix product, so the same weights would give other numbers."""
    for name in ("transformer", "vae", "text_encoder", "text_encoder_3"):
        assert all(p.data_ptr() % 64 == 0 for p in getattr(fresh.pipeline, name).parameters())


def test_compute_dtype(tiny_sd3_dir: Path, fresh: SD3_5Adapter) -> None:
    assert fresh.compute_dtype == torch.float32
    assert make_adapter(tiny_sd3_dir, {"mixed_precision": "bf16"}).compute_dtype == torch.bfloat16
    frozen = make_adapter(tiny_sd3_dir, {"model.frozen_parameters_dtype": "bf16"})
    assert frozen.compute_dtype == torch.bfloat16

"""Weights for other programs, and starting from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from tests.models.support import generators, make_adapter, plain_pipeline, stir
from tests.models.test_variants import velocity


def picture(adapter: SD3_5Adapter) -> Tensor:
    out = adapter.inference(
        adapter.encode_prompt(["star"], None, need_negative=True),
        initial_generators=generators([1]),
        num_inference_steps=3,
        guidance=adapter.guidance(3.0),
        height=32,
        width=32,
        solver="pipeline",
    )
    return out.trajectory.states[3].only


def plain_picture(pipeline: StableDiffusion3Pipeline) -> Tensor:
    # Weights in a mapped file may lie unaligned, which changes the last bits of products; see components.place.
    for name in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3"):
        for parameter in getattr(pipeline, name).parameters():
            parameter.data = parameter.data.clone()
    return pipeline(
        "star",
        num_inference_steps=3,
        guidance_scale=3.0,
        generator=generators([1]),
        height=32,
        width=32,
        max_sequence_length=10,
        output_type="latent",
    ).images


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"model.lora_rank": 4, "model.lora_alpha": 4}, True),
        ({"model.lora_rank": 4, "model.lora_alpha": 8, "model.lora_adapter_name": "style"}, True),
        ({"model.lora_rank": 4, "model.lora_alpha": 1}, True),
        ({"model.lora_rank": 6, "model.lora_alpha": 8}, False),
        ({"model.lora_rank": 4, "model.lora_alpha": 8, "model.lora_adapter_name": "attn"}, True),
    ],
)
def test_exported_lora_loads_in_plain_diffusers(
    tiny_sd3_dir: Path, tmp_path: Path, changes: dict[str, Any], exact: bool
) -> None:
    """Pitfalls 24, 27, 54: an empty LoRA; keys that `load_lora_weights` cannot read; alpha lost on export."""
    adapter = make_adapter(tiny_sd3_dir, changes)
    stir(adapter)
    file = adapter.export_lora(tmp_path / "lora")
    state = load_file(file)
    assert len(state) == len(adapter.trainable_parameters())
    for key, tensor in state.items():
        assert key.startswith("transformer.transformer_blocks.")
        assert key.endswith((".lora_A.weight", ".lora_B.weight")) and key.count("lora_") == 1
        assert ".default" not in key and ".style" not in key and "base_layer" not in key
        assert tensor.dtype == torch.float32 and float(tensor.abs().max()) > 0

    pipeline = plain_pipeline(tiny_sd3_dir)
    before = plain_picture(pipeline)
    pipeline.load_lora_weights(str(tmp_path / "lora"), weight_name=file.name)
    after, own = plain_picture(pipeline), picture(adapter)
    assert not torch.allclose(before, after, atol=1e-3)
    if exact:
        assert torch.equal(after, own)
    else:
        torch.testing.assert_close(after, own, rtol=0, atol=1e-5)


def test_export_of_a_snapshot(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_sd3_dir, prepare=False)
    snapshot = adapter.add_snapshot("ema")
    adapter.prepare()
    stir(adapter)
    snapshot.update(0.5)
    state = load_file(adapter.export_lora(tmp_path, "ema.safetensors", variant="ema"))
    live = load_file(adapter.export_lora(tmp_path, "live.safetensors"))
    assert state.keys() == live.keys() and all(not torch.equal(state[k], live[k]) for k in state)
    with pytest.raises(InputError, match="'emma'"):
        adapter.export_lora(tmp_path, variant="emma")


@pytest.mark.parametrize("kind", [None, "lora"])
def test_a_run_starts_from_an_exported_lora(tiny_sd3_dir: Path, tmp_path: Path, kind: str | None) -> None:
    source = make_adapter(tiny_sd3_dir)
    stir(source)
    source.export_lora(tmp_path)
    changes = {"model.resume_path": str(tmp_path), **({"model.resume_type": kind} if kind else {})}
    again = make_adapter(tiny_sd3_dir, changes)
    assert all(
        torch.equal(a, b) for a, b in zip(*(x.trainable_parameters().values() for x in (source, again)), strict=True)
    )
    assert torch.equal(velocity(again), velocity(source))
    # Another alpha reads the same function.
    other = make_adapter(tiny_sd3_dir, {**changes, "model.lora_alpha": 16})
    assert torch.equal(velocity(other), velocity(source))


def test_other_layouts_are_read(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """PEFT prefixes, and an alpha kept beside the weights or in the file's metadata."""
    source = make_adapter(tiny_sd3_dir)
    stir(source)
    state = load_file(source.export_lora(tmp_path / "ours"))
    peft = {f"base_model.model.{k.removeprefix('transformer.')}": v for k, v in state.items()}
    unfolded = {k: v / 2 if k.endswith("lora_B.weight") else v for k, v in state.items()}
    alphas = {k.replace(".lora_B.weight", ".alpha"): torch.tensor(8.0) for k in state if k.endswith("lora_B.weight")}
    save_file(peft, tmp_path / "peft.safetensors")
    save_file({**unfolded, **alphas}, tmp_path / "alpha.safetensors")
    source.pipeline.save_lora_weights(
        str(tmp_path / "metadata"),
        transformer_lora_layers={k.removeprefix("transformer."): v for k, v in unfolded.items()},
        transformer_lora_adapter_metadata={"r": 4, "lora_alpha": 8},
    )
    with safe_open(tmp_path / "metadata" / "pytorch_lora_weights.safetensors", "pt") as file:
        assert "lora_adapter_metadata" in file.metadata()
    for path in ("peft.safetensors", "alpha.safetensors", "metadata"):
        again = make_adapter(tiny_sd3_dir, {"model.resume_path": str(tmp_path / path)})
        assert torch.equal(velocity(again), velocity(source)), path


def test_full_weights_round_trip(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    source = make_adapter(tiny_sd3_dir, {"model.finetune_type": "full"})
    stir(source, scale=0.01)
    source.save_full(tmp_path)
    loaded = SD3Transformer2DModel.from_pretrained(str(tmp_path), subfolder="transformer")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, source.trainable_parameters()[f"transformer.{name}"])
    again = make_adapter(tiny_sd3_dir, {"model.finetune_type": "full", "model.resume_path": str(tmp_path)})
    assert torch.equal(velocity(again), velocity(source))
    lora = make_adapter(tiny_sd3_dir, {"model.resume_path": str(tmp_path)})
    assert torch.equal(velocity(lora), velocity(source)), "a LoRA starts from full weights"


def test_what_does_not_fit_is_refused(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 25: LoRA resumed for full tuning silently stays LoRA."""
    source = make_adapter(tiny_sd3_dir)
    stir(source)
    source.export_lora(tmp_path / "lora")
    full = {"model.finetune_type": "full"}
    with pytest.raises(InputError, match="holds a LoRA"):
        make_adapter(tiny_sd3_dir, {**full, "model.resume_path": str(tmp_path / "lora")})
    with pytest.raises(InputError, match="shape"):
        make_adapter(tiny_sd3_dir, {"model.lora_rank": 8, "model.resume_path": str(tmp_path / "lora")})
    with pytest.raises(InputError, match="unknown"):
        make_adapter(tiny_sd3_dir, {"model.target_modules": ["to_q"], "model.resume_path": str(tmp_path / "lora")})
    (tmp_path / "damaged.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(InputError, match=r"model\.resume_path: .*damaged\.safetensors' is damaged"):
        make_adapter(tiny_sd3_dir, {"model.resume_path": str(tmp_path / "damaged.safetensors")})
    with pytest.raises(InputError, match="no LoRA file"):
        make_adapter(tiny_sd3_dir, {"model.resume_path": str(tmp_path / "nothing")})
    with pytest.raises(InputError, match="no folder 'transformer'"):
        make_adapter(tiny_sd3_dir, {**full, "model.resume_path": str(tmp_path), "model.resume_type": "full"})
    save_file({"transformer.x.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"transformer\.x\.weight"):
        make_adapter(tiny_sd3_dir, {"model.resume_path": str(tmp_path / "other.safetensors")})
    with pytest.raises(InputError, match="'full'"):
        make_adapter(tiny_sd3_dir, full).export_lora(tmp_path)
    with pytest.raises(InputError, match="'lora'"):
        source.save_full(tmp_path)

"""Pipeline folders with merged weights: the sum written out, shards, low precision, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.merge import copy_pipeline, write_component

WRAPPED = "transformer_blocks.0.attn.to_q"


def make_lora(size: int, module: str = WRAPPED) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{module}.lora_A.weight": torch.randn(3, size, generator=generator),
        f"{module}.lora_B.weight": torch.randn(size, 3, generator=generator),
    }


def read(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def test_one_weight_changes_by_the_product_and_the_rest_not_at_all(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    source = tiny_sd3_dir / "transformer"
    before = read(source)
    lora = make_lora(before[f"{WRAPPED}.weight"].shape[0])
    write_component(source, tmp_path / "transformer", lora)
    after = read(tmp_path / "transformer")
    change = lora[f"{WRAPPED}.lora_B.weight"].double() @ lora[f"{WRAPPED}.lora_A.weight"].double()
    for name, value in before.items():
        if name == f"{WRAPPED}.weight":
            torch.testing.assert_close(after[name].double(), value.double() + change, rtol=0, atol=2e-6)
        else:
            assert torch.equal(after[name], value)
    loaded = SD3Transformer2DModel.from_pretrained(str(tmp_path), subfolder="transformer")
    assert torch.equal(loaded.state_dict()[f"{WRAPPED}.weight"], after[f"{WRAPPED}.weight"])


def test_low_precision_is_rounded_once_after_a_float32_sum(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """A bf16 checkpoint stays bf16; adding in bf16 would lose what is below 1/256 of a weight."""
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in read(tiny_sd3_dir / "transformer").items()}
    (tmp_path / "half").mkdir()
    save_file(half, tmp_path / "half" / "diffusion_pytorch_model.safetensors")
    lora = make_lora(half[f"{WRAPPED}.weight"].shape[0])
    write_component(tmp_path / "half", tmp_path / "merged", lora)
    write_component(tmp_path / "half", tmp_path / "fp32", lora, torch.float32)
    write_component(tmp_path / "half", tmp_path / "fp16", lora, torch.float16)
    exact = half[f"{WRAPPED}.weight"].float() + lora[f"{WRAPPED}.lora_B.weight"] @ lora[f"{WRAPPED}.lora_A.weight"]
    merged, wide, other = (read(tmp_path / name) for name in ("merged", "fp32", "fp16"))
    assert torch.equal(merged[f"{WRAPPED}.weight"], exact.bfloat16())
    assert torch.equal(wide[f"{WRAPPED}.weight"], exact)  # not by way of the file's bf16
    assert torch.equal(other[f"{WRAPPED}.weight"], exact.half())
    assert not torch.equal(exact.half(), exact.bfloat16().half())
    assert all(v.dtype == torch.float32 for v in wide.values() if v.is_floating_point())


def test_shards_stay_shards(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    model = SD3Transformer2DModel.from_pretrained(str(tiny_sd3_dir), subfolder="transformer")
    model.save_pretrained(tmp_path / "in" / "transformer", max_shard_size="60KB")
    lora = make_lora(model.state_dict()[f"{WRAPPED}.weight"].shape[0])
    (tmp_path / "out").mkdir()
    write_component(tmp_path / "in" / "transformer", tmp_path / "out" / "transformer", lora, torch.bfloat16)
    names = sorted(p.name for p in (tmp_path / "out" / "transformer").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "in" / "transformer").iterdir())
    assert sum(name.endswith(".safetensors") for name in names) > 1
    index = json.loads(
        (tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text()
    )
    written = read(tmp_path / "out" / "transformer")
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in written.values())
    loaded = SD3Transformer2DModel.from_pretrained(str(tmp_path / "out"), subfolder="transformer", dtype=torch.bfloat16)
    assert torch.equal(loaded.state_dict()[f"{WRAPPED}.weight"], written[f"{WRAPPED}.weight"])


def test_a_lora_that_does_not_belong_is_refused(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    source = tiny_sd3_dir / "transformer"
    with pytest.raises(InputError, match=r"'other\.to_q\.weight' .*model it was trained on"):
        write_component(source, tmp_path / "a", make_lora(32, "other.to_q"))
    with pytest.raises(InputError, match=r"changes 'transformer_blocks\.0\.attn\.to_q\.weight' by \(7, 7\)"):
        write_component(source, tmp_path / "b", make_lora(7))
    half = make_lora(32)
    del half[f"{WRAPPED}.lora_A.weight"]
    with pytest.raises(InputError, match="without its lora_A"):
        write_component(source, tmp_path / "c", half)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"diffusion_pytorch_model\.safetensors is damaged"):
        write_component(tmp_path / "damaged", tmp_path / "d")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no safetensors weights"):
        write_component(tmp_path / "empty", tmp_path / "e")


def test_pickles_and_variants_are_left_behind(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    import shutil

    source = Path(shutil.copytree(tiny_sd3_dir, tmp_path / "source"))
    (source / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
    (source / "vae" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"variant")
    (source / "single_file.safetensors").write_bytes(b"everything once more")
    (tmp_path / "copy").mkdir()
    copy_pipeline(source, tmp_path / "copy")
    copied = {p.relative_to(tmp_path / "copy") for p in (tmp_path / "copy").rglob("*") if p.is_file()}
    assert copied == {p.relative_to(tiny_sd3_dir) for p in tiny_sd3_dir.rglob("*") if p.is_file()}
    StableDiffusion3Pipeline.from_pretrained(str(tmp_path / "copy"))

    (source / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="pickled ones are not copied"):
        copy_pipeline(source, tmp_path / "other")
    with pytest.raises(InputError, match="no diffusers pipeline"):
        copy_pipeline(tmp_path / "empty", tmp_path / "other")


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", ".", ""])
def test_a_component_that_is_no_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    """Copying `../outside` would write beside the target."""
    source, target = tmp_path / "in" / "pipeline", tmp_path / "out" / "pipeline"
    for folder in (source / "a" / "b", source.parent / "outside", target):
        folder.mkdir(parents=True)
    (source.parent / "outside" / "config.json").write_text("{}")
    (source / "model_index.json").write_text(json.dumps({name: ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(InputError, match="no plain name"):
        copy_pipeline(source, target)
    assert [p.name for p in target.parent.iterdir()] == ["pipeline"]

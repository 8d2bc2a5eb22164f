"""LoRA files for ComfyUI: what they add to the weights, against diffusers' own converters of checkpoints and LoRAs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from diffusers.loaders import lora_conversion_utils, single_file_utils
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.comfyui import DiffusersNames, Factors, Fusion, fuse
from flow_factory.models.minimax_h3.comfyui import NAMES
from flow_factory.models.registry import get_adapter_class

RANK = 2


def factors(out: int, rank: int = RANK, inputs: int = 8) -> Factors:
    return Factors(torch.randn(rank, inputs), torch.randn(out, rank))


def lora(modules: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """A random LoRA in diffusers' layout, of modules with [out, in] features."""
    torch.manual_seed(0)
    state: dict[str, Tensor] = {}
    for name, (out, inputs) in modules.items():
        state[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
        state[f"{name}.lora_B.weight"] = torch.randn(out, RANK)
    return state


def deltas(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What a file of `lora_A` and `lora_B` adds, by the weight's name without the prefix."""
    return {
        key.removeprefix(prefix).replace(".lora_A", ""): state[key.replace("lora_A", "lora_B")] @ down
        for key, down in state.items()
        if ".lora_A." in key
    }


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-5, msg=name)


def test_fused_factors_add_what_their_parts_add() -> None:
    torch.manual_seed(0)
    parts = [factors(5), factors(3, rank=4), factors(3, rank=1)]
    whole = fuse(parts)
    assert whole.down.shape == (7, 8) and whole.up.shape == (11, 7)
    torch.testing.assert_close(whole.up @ whole.down, torch.cat([up @ down for down, up in parts]))


def test_a_part_without_a_lora_gets_rows_of_zeros() -> None:
    torch.manual_seed(0)
    layers = {"b.0.q": factors(5), "b.0.v": factors(5)}
    down, up = Fusion(("q", "k", "v")).apply(layers, "b.0.")
    expected = [layers["b.0.q"].up @ layers["b.0.q"].down, torch.zeros(5, 8), layers["b.0.v"].up @ layers["b.0.v"].down]
    assert down.shape == (2 * RANK, 8)
    torch.testing.assert_close(up @ down, torch.cat(expected))
    with pytest.raises(InputError, match=r"q, k, v as one weight.*nothing for b\.0\.k, and their sizes differ"):
        Fusion(("q", "k", "v"), even=False).apply(layers, "b.0.")


def test_a_module_without_a_known_name_is_an_error() -> None:
    """ComfyUI would drop it with a line in its log."""
    known = {"transformer.blocks.0.ffn.net.2": (8, 8)}
    wan = get_adapter_class("wan2_t2v")
    assert list(wan.comfyui_lora(lora(known))[""]) == [
        "diffusion_model.blocks.0.ffn.2.lora_A.weight",
        "diffusion_model.blocks.0.ffn.2.lora_B.weight",
    ]
    for other in ("transformer.proj_out", "transformer.blocks.0.ffn.net.3", "transformer.patch_embedding"):
        with pytest.raises(InputError, match=rf"a LoRA of {other.removeprefix('transformer.')} are not known"):
            wan.comfyui_lora(lora(known | {other: (8, 8)}))
    many = {f"transformer.distilled_guidance_layer.layers.{i}.linear_1": (8, 8) for i in range(5)}
    with pytest.raises(InputError, match=r"layers\.2\.linear_1 and 2 more are not known"):
        get_adapter_class("chroma").comfyui_lora(lora(many))


@pytest.mark.parametrize("key", ["sana", "cogview4"])
def test_a_family_that_comfyui_does_not_know(key: str) -> None:
    with pytest.raises(InputError, match=r"not known here for \w+Adapter. Use --format diffusers"):
        get_adapter_class(key).comfyui_lora(lora({"transformer.transformer_blocks.0.attn1.to_q": (8, 8)}))


def test_two_experts_are_two_files() -> None:
    wan, first, second = (get_adapter_class("wan2_i2v"), *(f"{c}.blocks.0.attn1.to_q" for c in EXPERTS))
    state = lora({first: (8, 8), second: (8, 8)})
    files = wan.comfyui_lora(state)
    key = "diffusion_model.blocks.0.self_attn.q.lora_B.weight"
    assert list(files) == ["high_noise", "low_noise"]
    assert torch.equal(files["high_noise"][key], state[f"{first}.lora_B.weight"])
    assert torch.equal(files["low_noise"][key], state[f"{second}.lora_B.weight"])
    assert list(wan.comfyui_lora(lora({first: (8, 8)}))) == [""]  # a checkpoint of one network, or the first of two
    assert list(wan.comfyui_lora(lora({second: (8, 8)}))) == ["low_noise"]


EXPERTS = ("transformer", "transformer_2")


def test_diffusers_own_names_are_kept() -> None:
    state = lora({"transformer.transformer_blocks.0.attn.to_q": (8, 8)})
    (written,) = DiffusersNames("").convert(state).values()
    assert written.keys() == state.keys() and all(torch.equal(written[k], state[k]) for k in state)


def nextdit(block: str, mlp: str, widths: tuple[int, int, int], width: int) -> dict[str, tuple[int, int]]:
    q, k, v = widths
    attention = {"to_q": (q, width), "to_k": (k, width), "to_v": (v, width), "to_out.0": (width, q)}
    layers = {f"{mlp}{i}": (12, width) if i != 2 else (width, 12) for i in (1, 2, 3)}
    return {f"{block}.{name}": shape for name, shape in (attention | layers).items()}


def test_lumina2_has_the_names_of_its_checkpoint() -> None:
    """Diffusers' converters of Lumina 2's checkpoints and LoRAs know its real widths only: q 2304, k and v 768."""
    width, widths = 2304, (2304, 768, 768)
    refiner = {
        name.replace(".to_", ".attn.to_"): shape
        for name, shape in nextdit("context_refiner.0", "feed_forward.linear_", widths, width).items()
    }
    state = lora({f"transformer.{name}": shape for name, shape in refiner.items()})
    (written,) = get_adapter_class("lumina2").comfyui_lora(state).values()
    converted = single_file_utils.convert_lumina2_to_diffusers(deltas(written, "diffusion_model."))
    assert_same(converted, deltas(state, "transformer."))
    # Its LoRA converter wants adaptive norms in the other lists of blocks.
    loaded = lora_conversion_utils._convert_non_diffusers_lumina2_lora_to_diffusers(dict(written))
    assert_same(deltas(loaded, "transformer."), deltas(state, "transformer."))


def test_minimax_h3_has_the_names_of_its_checkpoint() -> None:
    """Its gate's rows are above the value's there, below them in diffusers."""
    modules = {
        f"{block}.{name}": shape
        for block in ("transformer_blocks.0", "transformer_blocks.1", "token_refiner.refiner_blocks.0")
        for name, shape in {
            **{f"attn.to_{part}": (8, 8) for part in ("q", "k", "v", "out.0")},
            "ff.net.0.proj": (12, 8),
            "ff.net.2": (8, 6),
        }.items()
    }
    state = lora({f"transformer.{name}": shape for name, shape in modules.items()})
    (written,) = NAMES.convert(state).values()
    converted = single_file_utils.convert_minimax_h3_transformer_checkpoint_to_diffusers(
        deltas(written, "diffusion_model."), config={}
    )
    assert_same(converted, deltas(state, "transformer."))
    loaded = lora_conversion_utils._convert_non_diffusers_minimax_h3_lora_to_diffusers(dict(written))
    assert_same(deltas(loaded, "transformer."), deltas(state, "transformer."))


@pytest.mark.parametrize("blocks", ["layers.1", "noise_refiner.0", "context_refiner.0"])
def test_z_image_has_the_names_of_its_checkpoint(blocks: str) -> None:
    layers = {
        name.replace(".to_", ".attention.to_"): shape
        for name, shape in nextdit(blocks, "feed_forward.w", (8, 8, 8), 8).items()
    }
    state = lora({f"transformer.{name}": shape for name, shape in layers.items()})
    (written,) = get_adapter_class("z-image").comfyui_lora(state).values()
    converted = single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers(
        deltas(written, "diffusion_model.")
    )
    assert_same(converted, deltas(state, "transformer."))

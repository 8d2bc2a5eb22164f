"""How ComfyUI names the layers of MiniMax-H3."""

from __future__ import annotations

from flow_factory.models.comfyui import Blocks, CheckpointNames, Fusion, checkpoint_keys

NAMES = CheckpointNames(
    checkpoint_keys("convert_minimax_h3_transformer_checkpoint_to_diffusers"),
    tuple(
        Blocks(
            own,
            theirs,
            {"attn.to_out.0": "attn.out_proj", "ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2"},
            {"attn.qkv_proj": Fusion(("attn.to_q", "attn.to_k", "attn.to_v"))},
            swapped=("ff.net.0.proj",),  # the gate is above the value there, below it in diffusers
        )
        for own, theirs in (
            ("transformer_blocks", "blocks"),
            ("token_refiner.refiner_blocks", "token_refiner.blocks"),
        )
    ),
)

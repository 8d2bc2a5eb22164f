"""Stable Diffusion 3 and 3.5: three text encoders, dual attention, one forward for both predictions."""

from __future__ import annotations

from functools import partial

from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from tests.models.tiny_pipelines import build_tiny_sd3
from tests.parity.case import Case, cfg_settings
from tests.parity.parts import seeded

CASES = [
    Case(
        key="sd3-5",
        build=seeded(partial(build_tiny_sd3, positions=32)),
        settings=cfg_settings(4.5),
        generation={"max_sequence_length": 10},
        call={"max_sequence_length": 10},
        schedulers={
            "dynamic shift": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=16),
            "heun": FlowMatchHeunDiscreteScheduler(shift=3.0),
            "unipc": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            "dpm++": DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
        },
        # Three blocks of 8 projections and 4 of MLPs, 4 more in the dual-attention block; the last block has no context
        # output and no MLP behind it, and its text query is dead.
        wrapped=3 * (8 + 4) + 4 - 2 - 2,
    )
]

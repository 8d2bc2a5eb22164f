"""Stable Diffusion 1.5 and XL: epsilon and v prediction in flow coordinates, with the schedulers that people use."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
)
from torch import Tensor

from tests.models.tiny_pipelines import clip_encoder, clip_tokenizer
from tests.parity.case import Case, Setting, cfg_settings
from tests.parity.parts import autoencoder, clip_text_model, seeded

BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
LEADING: dict[str, Any] = {**BETAS, "timestep_spacing": "leading", "steps_offset": 1}


def unet(cross_attention: int, **keywords: Any) -> UNet2DConditionModel:
    """One attention block down, in the middle and up."""
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=cross_attention,
        **keywords,
    )


def build_sd(scheduler: Any) -> StableDiffusionPipeline:
    """One CLIP encoder."""
    tokens = clip_tokenizer()
    return StableDiffusionPipeline(
        vae=autoencoder(shift=None, quant=True),
        text_encoder=clip_text_model(16, len(tokens)),
        tokenizer=tokens,
        unet=unet(
            16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def build_sdxl() -> StableDiffusionXLPipeline:
    """Two CLIP encoders, added time ids."""
    tokens = clip_tokenizer()
    return StableDiffusionXLPipeline(
        vae=autoencoder(shift=None, quant=True),
        text_encoder=clip_text_model(16, len(tokens)),
        tokenizer=tokens,
        text_encoder_2=clip_encoder(24, len(tokens)),
        tokenizer_2=tokens,
        unet=unet(
            40,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24 + 6 * 8,
        ),
        scheduler=EulerDiscreteScheduler(**LEADING),
        force_zeros_for_empty_prompt=False,
    )


def grid(scheduler: Any) -> tuple[Tensor, Tensor]:
    """1 / (1 + a / s), with a^2 the product of alphas at each timestep, and at the step after the last one."""
    if hasattr(scheduler, "sigmas"):
        signal_to_noise = 1.0 / scheduler.sigmas.double()
    else:
        products = [scheduler.alphas_cumprod[t] for t in scheduler.timesteps.tolist()]
        products.append(scheduler.final_alpha_cumprod)
        product = torch.stack([torch.as_tensor(p) for p in products]).double()
        signal_to_noise = (product / (1.0 - product)).sqrt()
    sigmas, timesteps = (1.0 / (1.0 + signal_to_noise)).float(), scheduler.timesteps
    if isinstance(scheduler, PNDMScheduler) and len(timesteps) > 2:  # its second point is evaluated twice
        sigmas, timesteps = torch.cat([sigmas[:1], sigmas[2:]]), torch.cat([timesteps[:1], timesteps[2:]])
    return sigmas, timesteps


class DiscreteEulerOn(EulerDiscreteScheduler):
    """Euler steps, and unit variance at the start, on the grid that another scheduler has made."""

    def copy_grid(self, scheduler: Any) -> DiscreteEulerOn:
        self._grid = (scheduler.sigmas.clone(), scheduler.timesteps.float())
        return self

    def set_timesteps(self, num_inference_steps: Any = None, device: Any = None) -> None:
        self.sigmas, self.timesteps = (tensor.clone() for tensor in self._grid)
        self.num_inference_steps = len(self.timesteps)
        self._step_index = self._begin_index = None


def ddim_counterpart(scheduler: Any) -> Any:
    """A scheduler whose steps are those of DDIM with eta 0, which are the flow's Euler steps."""
    if isinstance(scheduler, DDIMScheduler | EulerDiscreteScheduler):
        return scheduler
    kind = {"prediction_type": scheduler.config.prediction_type}
    if hasattr(scheduler, "sigmas"):
        return DiscreteEulerOn(**LEADING, **kind).copy_grid(scheduler)
    return DDIMScheduler(**LEADING, **DDIM, **kind)


DDIM = {"clip_sample": False, "set_alpha_to_one": False}
CASES = [
    Case(
        key="sd1-5",
        build=seeded(lambda: build_sd(PNDMScheduler(**LEADING, skip_prk_steps=True, set_alpha_to_one=False))),
        settings=(
            *cfg_settings(4.0),
            Setting(
                "rescaled",
                4.0,
                {"guidance_rescale": 0.7},
                {"guidance_scale": 4.0, "guidance_rescale": 0.7},
            ),
        ),
        schedulers={
            "ddim": DDIMScheduler(**LEADING, **DDIM),
            "ddim, v": DDIMScheduler(**LEADING, **DDIM, prediction_type="v_prediction"),
            "euler": EulerDiscreteScheduler(**LEADING),
            "dpm++": DPMSolverMultistepScheduler(**LEADING),
            "unipc, v": UniPCMultistepScheduler(**LEADING, prediction_type="v_prediction"),
        },
        grid=grid,
        euler=ddim_counterpart,
        # Transformer blocks: one down, two up, one in the middle; in each two attentions of 4 layers, and an MLP of 2.
        wrapped=4 * 10,
        uncovered=(r".*\.time_emb_proj",),
        components=("unet",),
    ),
    Case(
        key="sdxl",
        build=seeded(build_sdxl),
        settings=cfg_settings(4.0),
        schedulers={"trailing": EulerDiscreteScheduler(**BETAS, timestep_spacing="trailing")},
        grid=grid,
        euler=ddim_counterpart,
        # Blocks of two layers: one down, two up, one in the middle.
        wrapped=8 * 10,
        uncovered=(r".*\.time_emb_proj", r".*\.proj_(in|out)"),
        components=("unet",),
    ),
]

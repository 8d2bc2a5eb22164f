"""One network that reads words and draws pixels, with its pipeline, its spec and its adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.image_processor import VaeImageProcessor
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from flow_factory.hparams import ModelSpec
from flow_factory.hparams.models.media import TEXT_TO_IMAGE
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.images import to_bytes, to_pil, to_pixels
from flow_factory.models.pseudo_pipeline import PseudoPipeline
from flow_factory.models.registry import register_adapter
from flow_factory.samples import ComponentTimes, Condition, LatentState, draw_normal

LENGTH = 8
PATCH = 4


class Block(nn.Module):
    """Attention of all tokens to all that are no padding, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, N, width] to the same; mask [B, N], True at tokens that are read."""
        h = self.norm1(x)
        attended = nn.functional.scaled_dot_product_attention(
            self.to_q(h), self.to_k(h), self.to_v(h), attn_mask=mask[:, None, :].expand(-1, x.shape[1], -1)
        )
        x = x + self.to_out(attended)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class TinyPixelsModel(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Words and 4 x 4 patches of pixels in one sequence; predicts noise - data."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, vocab_size: int = 300, width: int = 24, layers: int = 2, max_side: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.patches = nn.Linear(3 * PATCH**2, width)
        self.rows, self.columns = nn.Embedding(max_side, width), nn.Embedding(max_side, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.pixels = nn.Linear(width, 3 * PATCH**2)
        self.gradient_checkpointing = False

    def forward(self, pixels: Tensor, sigma: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Velocity [B, 3, H, W] at pixels [B, 3, H, W] of noise level sigma [B], for words [B, L] with mask [B, L]."""
        height, width = pixels.shape[2] // PATCH, pixels.shape[3] // PATCH
        cells = nn.functional.pixel_unshuffle(pixels, PATCH).flatten(2).transpose(1, 2)
        places = self.rows(torch.arange(height))[:, None] + self.columns(torch.arange(width))[None]
        drawn = self.patches(cells) + places.flatten(0, 1) + self.time(sigma[:, None].to(cells.dtype))[:, None]
        x = torch.cat([self.words(input_ids), drawn], dim=1)
        read = torch.cat([mask.bool(), torch.ones_like(drawn[..., 0], dtype=torch.bool)], dim=1)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, read)
            else:
                x = block(x, read)
        out = self.pixels(x[:, input_ids.shape[1] :]).transpose(1, 2).unflatten(2, (height, width))
        return nn.functional.pixel_shuffle(out, PATCH)


class TinyPixelsPipeline(PseudoPipeline):
    """The parts, and the authors' sampler, which is what the adapter is compared with."""

    def __init__(
        self,
        transformer: TinyPixelsModel,
        tokenizer: PreTrainedTokenizerFast,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, tokenizer=tokenizer, scheduler=scheduler)
        self.image_processor = VaeImageProcessor(vae_scale_factor=PATCH)

    def read(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask, [B, L]."""
        tokens = self.tokenizer(
            list(texts), padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt"
        )
        return tokens.input_ids, tokens.attention_mask

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self,
        prompt: Sequence[str],
        negative_prompt: Sequence[str],
        height: int,
        width: int,
        num_inference_steps: int,
        guidance_scale: float,
        generator: Sequence[torch.Generator],
        output_type: str = "pil",
    ) -> Any:
        """Euler steps with classifier-free guidance."""
        x = torch.cat([torch.randn(1, 3, height, width, generator=g) for g in generator])
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            sigma = (t / 1000).expand(len(x))
            v = self.transformer(x, sigma, *self.read(prompt))
            if guidance_scale > 1:
                unguided = self.transformer(x, sigma, *self.read(negative_prompt))
                v = unguided + guidance_scale * (v - unguided)
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
        if output_type == "latent":
            return SimpleNamespace(images=x)
        return SimpleNamespace(images=[to_pil(picture) for picture in to_bytes(self, x)])


@dataclass(frozen=True)
class Words(Condition):
    """Token ids and masks [B, L]: the network that is trained embeds them itself."""

    input_ids: Tensor
    mask: Tensor
    negative_ids: Tensor | None = None
    negative_mask: Tensor | None = None


SPEC = ModelSpec(
    key="tiny-pixels",
    adapter="tests.outside.tiny_pixels.TinyPixelsAdapter",
    pipeline_class="TinyPixelsPipeline",
    io=TEXT_TO_IMAGE,
    size_factor=PATCH,
    resolution_floor=PATCH,
    default_lora_targets=("to_q", "to_k", "to_v", "to_out", "up", "down"),
    required_components=("transformer", "tokenizer", "scheduler"),
)


@register_adapter("tiny-pixels", SPEC)
class TinyPixelsAdapter(BaseAdapter[Words]):
    """Everything that the toolkit needs to know of the model."""

    condition_class = Words

    def load_pipeline(self) -> TinyPixelsPipeline:
        return self.load_diffusers(TinyPixelsPipeline)

    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> Words:
        positive = self.pipeline.read(prompts)
        negative = self.pipeline.read([n or "" for n in negative_prompts or [None] * len(prompts)])
        return Words(*positive, *(negative if need_negative else (None, None)))

    def prepare_latents(
        self,
        condition: Words | None,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        return LatentState.single(draw_normal((3, height, width), generators).to(self.device))

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: Words, guidance: GuidanceSpec
    ) -> LatentState:
        def network(input_ids: Tensor, mask: Tensor) -> Tensor:
            pixels = self.network_input("transformer", state.only)
            return self.network("transformer")(pixels, times.only.timestep / 1000, input_ids, mask)

        velocity = network(condition.input_ids, condition.mask)
        if guidance.active(times):
            assert condition.negative_ids is not None and condition.negative_mask is not None
            velocity = guidance.combine(velocity, network(condition.negative_ids, condition.negative_mask), times)
        return LatentState.single(velocity)

    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        return to_bytes(self.pipeline, state.only)

    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        return LatentState.single(to_pixels(self.pipeline, media, self.device).float())

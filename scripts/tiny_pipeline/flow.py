"""Flow matching of the tiny transformer and its two text encoders on a pool of captioned latents."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0

from flow_factory.rewards.shapes_world import format_caption

from .autoencoder import KINDS, Log, draw_pictures, draw_scenes, mistaken, to_signed
from .parts import Parts, all_captions, caption_ids, encode_captions


@dataclass(frozen=True)
class FlowConfig:
    """How the transformer is trained. The learning rate is constant after a warm-up, then falls linearly to zero.

    `wrong_captions` are shares, by kind, of training pictures whose caption is wrong in one attribute, as captions of
    real data sets are. Without guidance the model then draws crisp pictures that are wrong about as often: that is what
    fine-tuning has to mend. With none it is right nearly always, and there is nothing to learn from a reward.
    """

    steps: int = 3000
    decay_steps: int = 1000
    batch_size: int = 64
    muon_learning_rate: float = 0.02
    adam_learning_rate: float = 1.5e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    caption_dropout: float = 0.1
    ema_decay: float = 0.996
    pool_size: int = 40_000
    kind_weights: tuple[float, float, float] = (0.2, 0.35, 0.45)
    wrong_captions: tuple[float, float, float] = (0.3, 0.4, 0.45)
    seed: int = 0

    def learning_rate_factor(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps, max(0.0, (self.steps - step) / self.decay_steps))


@dataclass(frozen=True)
class Pool:
    """Captioned latents: fp16 (N, 4, 16, 16), scaled as the pipeline does, and rows of :func:`all_captions` (N,)."""

    latents: torch.Tensor
    captions: torch.Tensor


@torch.no_grad()
def build_pool(vae: AutoencoderKL, config: FlowConfig, path: Path, log: Log) -> Pool:
    """Draw and encode the training pictures; a file written before is read back."""
    if path.exists():
        stored = torch.load(path, weights_only=True)
        return Pool(stored["latents"], stored["captions"])
    rng = np.random.default_rng(config.seed + 1)
    scenes = draw_scenes(rng, config.pool_size, config.kind_weights)
    rows = {caption: row for row, caption in enumerate(all_captions())}
    caption_rng = np.random.default_rng(config.seed + 2)
    wrong = dict(zip(KINDS, config.wrong_captions, strict=True))
    told = [mistaken(s, caption_rng) if caption_rng.random() < wrong[s.kind] else s for s in scenes]
    captions = torch.tensor([rows[format_caption(scene)] for scene in told])
    chunks = []
    for start in range(0, len(scenes), 100):
        mean = vae.encode(to_signed(draw_pictures(scenes[start : start + 100], rng))).latent_dist.mode()
        chunks.append(((mean - vae.config.shift_factor) * vae.config.scaling_factor).half())
    pool = Pool(torch.cat(chunks), captions)
    torch.save({"latents": pool.latents, "captions": pool.captions}, path)
    spread = pool.latents.float()
    log(f"pool: {len(scenes)} pictures, latent mean {spread.mean():.3f}, std {spread.std():.3f}")
    return pool


class RepeatedTail:
    """Joint attention in which the last text token stands for `log_copies.exp()` equal tokens, one number per row.

    The silent T5 adds `max_sequence_length` zero tokens to every caption. They have no position, so they stay equal to
    one another through all layers, and n of them attended to are one with log n added to its logit. Training with a
    random n for every row makes the pipeline indifferent to `max_sequence_length` at the price of one token.
    """

    def __init__(self) -> None:
        self.log_copies = torch.zeros(1)

    def __call__(
        self, attn: Attention, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return image.unflatten(-1, (attn.heads, -1)).transpose(1, 2), text.unflatten(
                -1, (attn.heads, -1)
            ).transpose(1, 2)

        query, text_query = heads(attn.to_q(hidden_states), attn.add_q_proj(encoder_hidden_states))
        key, text_key = heads(attn.to_k(hidden_states), attn.add_k_proj(encoder_hidden_states))
        value, text_value = heads(attn.to_v(hidden_states), attn.add_v_proj(encoder_hidden_states))
        query = torch.cat([attn.norm_q(query), attn.norm_added_q(text_query)], dim=2)
        key = torch.cat([attn.norm_k(key), attn.norm_added_k(text_key)], dim=2)
        bias = F.pad(self.log_copies[:, None], (key.shape[2] - 1, 0))[:, None, None, :]
        out = F.scaled_dot_product_attention(query, key, torch.cat([value, text_value], dim=2), attn_mask=bias)
        image, text = (
            out.transpose(1, 2).flatten(2).split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        )
        if not attn.context_pre_only:
            text = attn.to_add_out(text)
        return attn.to_out[0](image), text


def split_parameters(parts: Parts) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Matrices of the transformer's and the encoders' layers (for Muon) and everything else (for AdamW)."""
    matrices, others = [], []
    for module in parts.modules().values():
        for name, parameter in module.named_parameters():
            inner = ("blocks." in name or ".layers." in name) and ".norm" not in name
            (matrices if inner and parameter.ndim == 2 else others).append(parameter)
    return matrices, others


class FlowTrainer:
    """State of the training: parts, their average, optimizers and the step, saved and restored as one file."""

    def __init__(self, parts: Parts, config: FlowConfig) -> None:
        self.parts, self.config, self.step = parts, config, 0
        self.processor = RepeatedTail()
        self.average = {name: copy.deepcopy(module.state_dict()) for name, module in parts.modules().items()}
        matrices, others = split_parameters(parts)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=config.muon_learning_rate, weight_decay=config.weight_decay),
            torch.optim.AdamW(
                others, lr=config.adam_learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay
            ),
        ]
        self.base_rates = (config.muon_learning_rate, config.adam_learning_rate)
        self.ids = caption_ids(parts.tokenizer, all_captions())

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "modules": {name: module.state_dict() for name, module in self.parts.modules().items()},
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "config": asdict(self.config),
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step, self.average = state["step"], state["average"]
        for name, module in self.parts.modules().items():
            module.load_state_dict(state["modules"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def averaged_parts(self) -> Parts:
        parts = Parts(self.parts.tokenizer, *(copy.deepcopy(module) for module in self.parts.modules().values()))
        for name, module in parts.modules().items():
            module.load_state_dict(self.average[name])
        parts.transformer.set_attn_processor(JointAttnProcessor2_0())
        return parts

    def loss(self, pool: Pool) -> torch.Tensor:
        """Mean squared error of the velocity on one batch; its draws depend on the seed and the step alone."""
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        batch = config.batch_size
        rows = torch.randint(len(pool.captions), (batch,), generator=generator)
        captions = pool.captions[rows].clone()
        captions[torch.rand(batch, generator=generator) < config.caption_dropout] = 0
        data = pool.latents[rows].float()
        noise = torch.randn(data.shape, generator=generator)
        # Stratified logit-normal times: mean 0.3 leans to the noisy side, where place and kind are decided.
        quantile = (torch.randperm(batch, generator=generator) + torch.rand(batch, generator=generator)) / batch
        sigma = torch.sigmoid(0.3 + 1.1 * torch.special.ndtri(quantile.clamp(1e-4, 1 - 1e-4)))
        self.processor.log_copies = torch.rand(batch, generator=generator) * float(np.log(256))

        sequence, pooled = encode_captions(self.parts, self.ids[captions])
        sequence = torch.cat([sequence, sequence.new_zeros(batch, 1, sequence.shape[-1])], dim=1)
        blend = sigma.view(-1, 1, 1, 1)
        velocity = self.parts.transformer(
            hidden_states=(1 - blend) * data + blend * noise,
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            timestep=1000 * sigma,
            return_dict=False,
        )[0]
        return F.mse_loss(velocity, noise - data)

    def train_step(self, pool: Pool) -> float:
        factor = self.config.learning_rate_factor(self.step)
        for optimizer, rate in zip(self.optimizers, self.base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.zero_grad(set_to_none=True)
        loss = self.loss(pool)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for m in self.parts.modules().values() for p in m.parameters()], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.update_average()
        return loss.item()

    @torch.no_grad()
    def update_average(self) -> None:
        keep = min(self.config.ema_decay, (1 + self.step) / (10 + self.step))
        for name, module in self.parts.modules().items():
            live = [(key, value) for key, value in module.state_dict().items() if value.is_floating_point()]
            torch._foreach_lerp_([self.average[name][key] for key, _ in live], [value for _, value in live], 1 - keep)


def train_flow(
    trainer: FlowTrainer, pool: Pool, snapshot: Path, every: int, on_snapshot: Callable[[FlowTrainer], None], log: Log
) -> None:
    """Train until `config.steps`; every `every` steps write `snapshot` and call `on_snapshot(trainer)`."""
    trainer.parts.transformer.set_attn_processor(trainer.processor)
    for module in trainer.parts.modules().values():
        module.train()
    started, losses = time.monotonic(), []
    while trainer.step < trainer.config.steps:
        losses.append(trainer.train_step(pool))
        if trainer.step % 50 == 0:
            pace = (time.monotonic() - started) / len(losses)
            log(f"flow step {trainer.step}: loss {np.mean(losses):.4f}, {pace:.3f} s a step")
            losses, started = [], time.monotonic()
        if trainer.step % every == 0 or trainer.step == trainer.config.steps:
            trainer.save(snapshot)
            on_snapshot(trainer)
            started = time.monotonic()

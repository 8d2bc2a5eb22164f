"""What Stable Diffusion 1.x, 2.x and XL share: a U-Net in flow coordinates (see `coordinates.py`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.comfyui import LORA_KEYS, UnetNames
from flow_factory.models.conditions import PromptCondition, Prompts
from flow_factory.models.guidance import GuidanceSpec, guide_together
from flow_factory.models.stable_diffusion import coordinates as flow
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import ComponentTimes, Grid, LatentState


class StableDiffusionAdapter(TextToImageAdapter):
    """Text to image with a U-Net; latents [B, C, H / f, W / f]; guidance batched in one forward.

    The grid does not run from 1 to 0: it starts near 0.93 with the first timestep and ends where the scheduler's last
    step does (0.028 for the published checkpoints, whose schedulers do not set the last alpha to one).
    """

    comfyui = UnetNames(LORA_KEYS)

    @abstractmethod
    def added_conditions(self, latents: Tensor, prompts: Prompts) -> dict[str, Tensor] | None:
        """The U-Net's `added_cond_kwargs`."""

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        fields = generation or self.config.train_generation
        return GuidanceSpec(scale=guidance_scale, rescale=fields.guidance_rescale)

    def prepare_latents(
        self,
        condition: PromptCondition,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        factor, channels = self.pipeline.vae_scale_factor, self.pipeline.unet.config.in_channels
        shape = (len(generators), channels, height // factor, width // factor)
        # The pipeline's helper would also scale, with the state of a scheduler that has not been asked for its steps.
        noise = randn_tensor(shape, generator=list(generators), device=self.device, dtype=torch.float32)
        return LatentState.single(noise)

    def solver_grid(self, num_steps: int, state: LatentState, condition: Any, generation: Any = None) -> Grid:
        scheduler = flow.make_scheduler(self.pipeline.scheduler, num_steps, self.device)
        sigmas = flow.flow_sigmas(scheduler).to(self.device, torch.float32)
        return Grid.single(sigmas, scheduler.timesteps.clone())

    def sigma_grid(self, num_steps: int, state: LatentState, condition: Any, generation: Any = None) -> Grid:
        """The scheduler's grid, without points that it evaluates twice (PNDM's start)."""
        grid = self.solver_grid(num_steps, state, condition, generation)
        sigmas, timesteps = grid.primary, grid.timesteps["latent"]
        kept = sigmas[1:] < sigmas[:-1]
        return Grid.single(torch.cat([sigmas[:-1][kept], sigmas[-1:]]), timesteps[kept])

    def initial_state(self, noise: LatentState, grid: Grid, condition: PromptCondition) -> LatentState:
        # Unit variance in the model's own coordinates; a scheduler that keeps x0 + (s / a) e may start from (s / a) e.
        scheduler = flow.make_scheduler(self.pipeline.scheduler, self._asked_steps(grid), self.device)
        sigma = grid.primary[:1].expand(noise.batch_size)
        return noise.map(lambda x: self.from_scheduler(scheduler, x * scheduler.init_noise_sigma, sigma))

    def _asked_steps(self, grid: Grid) -> int:
        """num_inference_steps of a grid: PNDM evaluates one point twice."""
        timesteps = grid.timesteps["latent"]
        return len(timesteps.unique())

    def timestep_for_sigma(self, sigma: Tensor, state: LatentState) -> Tensor:
        """The timestep whose noise level is `sigma`, between two training timesteps by interpolation.

        Above the last timestep's sigma (about 0.936) and below the first one's (0.028) it is that timestep.
        """
        table = flow.sigma_of(self.pipeline.scheduler.alphas_cumprod.double()).to(sigma.device)
        wanted = sigma.double().clamp(table[0], table[-1])
        upper = torch.searchsorted(table, wanted).clamp(1, len(table) - 1)
        low, high = table[upper - 1], table[upper]
        return (upper - 1 + (wanted - low) / (high - low)).float()

    def to_scheduler(self, scheduler: Any, x: Tensor, sigma: Tensor) -> Tensor:
        if not flow.is_exploding(scheduler):
            return flow.preserving(x, sigma)
        scheduler.is_scale_input_called = True  # scaling is `preserving`, which the network's input has had
        return flow.exploding(x, sigma)

    def from_scheduler(self, scheduler: Any, x: Tensor, sigma: Tensor) -> Tensor:
        return (flow.from_exploding if flow.is_exploding(scheduler) else flow.from_preserving)(x, sigma)

    def scheduler_output(self, component: str, velocity: Tensor, state: Tensor, times: ComponentTimes) -> Tensor:
        return flow.output_of(velocity, state, times[component].sigma, self._prediction_type)

    def finalize_state(self, state: LatentState, condition: PromptCondition, grid: Grid) -> LatentState:
        """The pipeline decodes its scheduler's last sample, whatever noise is left in it."""
        scheduler = flow.make_scheduler(self.pipeline.scheduler, self._asked_steps(grid), self.device)
        sigma = grid.primary[-1:].expand(state.batch_size)
        return state.map(lambda x: self.to_scheduler(scheduler, x, sigma))

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        x, sigma = state.only, times.only.sigma
        own = flow.preserving(x, sigma)
        output = guide_together(guidance, times, condition, own, times.only.timestep, self._unet)
        return LatentState.single(flow.velocity_of(output.float(), x, sigma, self._prediction_type))

    def _unet(self, latents: Tensor, timestep: Tensor, prompts: Prompts) -> Tensor:
        return self.network("unet")(
            self.network_input("unet", latents),
            timestep,
            encoder_hidden_states=self.network_input("unet", prompts.embeds),
            added_cond_kwargs=self.added_conditions(latents, prompts),
            return_dict=False,
        )[0]

    @property
    def _prediction_type(self) -> str:
        kind = self.pipeline.scheduler.config.prediction_type
        if kind not in ("epsilon", "v_prediction"):
            raise InputError(
                f"the checkpoint's scheduler says prediction_type {kind!r}; {self.spec.key} knows epsilon and "
                f"v_prediction."
            )
        return kind

"""The adapters and reference results of one case, made when first asked for and kept for the session."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from flow_factory.contracts import Modality
from flow_factory.distributed import Comm
from flow_factory.hparams import get_model_spec, load_config_from_mapping
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.components import place
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.registry import get_adapter_class
from flow_factory.models.rollout import RolloutOutput
from flow_factory.samples import ConditionInputs, LatentState, Trajectory
from tests.models.support import generators, stir
from tests.parity.case import Case, Setting

SEEDS = (3, 4, 5)


class EulerOn(FlowMatchEulerDiscreteScheduler):
    """Euler steps on the grid that another scheduler has made."""

    def copy_grid(self, scheduler: Any) -> EulerOn:
        self._grid = (scheduler.sigmas.clone(), scheduler.timesteps.clone())
        return self

    def set_timesteps(
        self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, mu: Any = None
    ) -> None:
        self.sigmas, self.timesteps = (tensor.clone() for tensor in self._grid)
        self.num_inference_steps = len(self.timesteps)
        self._step_index = self._begin_index = None

    def step(self, model_output: Any, timestep: Any, sample: Any, **keywords: Any) -> Any:
        if self._step_index is None:
            self._step_index = int((self.timesteps == timestep).nonzero()[0])  # a pipeline may start late
        return super().step(model_output, timestep.float(), sample, **keywords)


class Bench:
    """One case.

    Args:
        case: The model.
        folder: An empty folder, for its checkpoint.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self._results: dict[Any, Any] = {}
        case.build().save_pretrained(str(folder), safe_serialization=True)

    # Both sides ----------------------------------------------------------------------------------------------------

    @cached_property
    def pipeline(self) -> Any:
        """The pipeline as a user loads it."""
        return self.load_pipeline()

    def load_pipeline(self) -> Any:
        """A pipeline of one's own, to load LoRA weights into."""
        workflow = self.fresh.spec.workflow
        extra = {} if workflow is None else {"workflow": workflow}
        pipeline = type(self.fresh.pipeline).from_pretrained(str(self.folder), **extra)
        if workflow is not None:
            pipeline.load_components()
        pipeline.set_progress_bar_config(disable=True)
        for module in pipeline.components.values():
            if isinstance(module, nn.Module):
                place(module, torch.device("cpu"))  # alignment changes the last bits of products
        return pipeline

    @cached_property
    def fresh(self) -> BaseAdapter[Any]:
        """An adapter as constructed: LoRA's B is zero, so it computes the pretrained model. Not to be changed."""
        return self.adapter()

    @cached_property
    def stirred(self) -> BaseAdapter[Any]:
        """An adapter whose LoRA has moved (rank 4, alpha 8)."""
        adapter = self.adapter()
        stir(adapter)
        return adapter

    @cached_property
    def stirred_latents(self) -> dict[str, Tensor]:
        """What it makes under the last setting, in the pipeline's layout."""
        return self.latents(self.roll(self.stirred, self.case.settings[-1], solver="pipeline", decode=False))

    @cached_property
    def full(self) -> BaseAdapter[Any]:
        """An adapter in full fine-tuning. Not to be changed."""
        return self.adapter({"model.finetune_type": "full"})

    def adapter(self, changes: Mapping[str, Any] | None = None, folder: Path | None = None) -> BaseAdapter[Any]:
        """An adapter with dotted changes to the configuration, of another checkpoint if a folder is given."""
        mapping = self.mapping()
        mapping["model"]["model_name_or_path"] = str(folder or self.folder)
        for path, value in (changes or {}).items():
            set_path(mapping, path, value)
        adapter = get_adapter_class(self.case.key)(load_config_from_mapping(mapping), Comm.single())
        adapter.prepare()
        return adapter

    def mapping(self) -> dict[str, Any]:
        """A configuration for the adapter alone."""
        return {
            "mixed_precision": "no",
            "data": {"dataset_dir": str(self.folder)},
            "model": {
                "model_type": self.case.key,
                "model_name_or_path": str(self.folder),
                "finetune_type": "lora",
                "target_components": list(self.case.components),
                "lora_rank": 4,
                "lora_alpha": 8,
            },
            "scheduler": {"dynamics_type": "Flow-SDE", "noise_level": 0.7},
            "train": {
                "trainer_type": "grpo",
                "resolution": list(self.case.size),
                "num_inference_steps": self.case.steps,
                "group_size": 2,
                "unique_sample_num_per_epoch": 2,
                "per_device_batch_size": min(2, get_model_spec(self.case.key).max_batch or 2),
                "gradient_step_per_epoch": 1,
                "seed": 11,
                **self.case.generation,
            },
            "rewards": {"name": "dark", "reward_model": "brightness"},
        }

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """The rows of one forward: all three, or as many as the model takes."""
        return (0, 1, 2)[: self.fresh.spec.max_batch]

    @cached_property
    def batches(self) -> list[tuple[int, ...]]:
        """All rows, in such batches."""
        size = len(self.batch)
        return [tuple(range(start, min(start + size, 3))) for start in range(0, 3, size)]

    @cached_property
    def makes_videos(self) -> bool:
        """Whether the outputs are videos."""
        return Modality.VIDEO in self.fresh.spec.io.outputs

    @property
    def trains_on_stored_media(self) -> bool:
        """Whether `sft` takes the model."""
        return self.fresh.supports_output_encoding and self.fresh.spec.no_stored_media is None

    # Inputs --------------------------------------------------------------------------------------------------------

    def generation(self, setting: Setting) -> Any:
        """The model-specific fields under a setting."""
        return type(self.fresh.config.train_generation)(**{**self.case.generation, **setting.generation})

    def guidance(self, setting: Setting) -> GuidanceSpec:
        """The guidance under a setting."""
        return self.fresh.guidance(setting.scale, self.generation(setting))

    def inputs(self, rows: Sequence[int] = (0, 1, 2), **changes: Any) -> list[ConditionInputs]:
        """The inputs of some rows; `changes` are fields that all of them have otherwise."""
        case = self.case
        return [
            replace(ConditionInputs(case.prompts[i], case.size, case.negatives[i], case.media[i]), **changes)
            for i in rows
        ]

    def condition(
        self, adapter: BaseAdapter[Any], setting: Setting, rows: Sequence[int] = (0, 1, 2), **changes: Any
    ) -> Any:
        """The encoded inputs of some rows; `changes` as in `inputs`."""
        need = self.guidance(setting).needs_negative()
        return adapter.encode_inputs(self.inputs(rows, **changes), need, self.generation(setting))

    # Results -------------------------------------------------------------------------------------------------------

    def roll(
        self,
        adapter: BaseAdapter[Any],
        setting: Setting,
        *,
        guidance: GuidanceSpec | None = None,
        rows: Sequence[int] = (0, 1, 2),
        steps: int | None = None,
        inputs: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> RolloutOutput:
        """The adapter's rollout for some rows of the inputs; `inputs` changes fields of theirs.

        A model that takes fewer rows at a time makes them in several rollouts.
        """
        if len(rows) > len(self.batch):
            same = {"guidance": guidance, "steps": steps, "inputs": inputs, **keywords}
            return _one_rollout([self.roll(adapter, setting, rows=(row,), **same) for row in rows])
        height, width = self.case.size
        return adapter.inference(
            self.condition(adapter, setting, rows, **(inputs or {})),
            initial_generators=generators([SEEDS[i] for i in rows]),
            num_inference_steps=steps or self.case.steps,
            guidance=guidance or self.guidance(setting),
            height=height,
            width=width,
            generation=self.generation(setting),
            **keywords,
        )

    def latents(self, output: RolloutOutput) -> dict[str, Tensor]:
        """The final latents of a rollout in the pipeline's layout."""
        final = output.trajectory.states[output.grid.length]
        return self.case.layout(self.pipeline, self.fresh.finalize_state(final, None, output.grid))

    def reference(
        self,
        setting: Setting,
        output_type: str = "latent",
        rows: Sequence[int] = (0, 1, 2),
        steps: int | None = None,
        pipeline: Any = None,
    ) -> Any:
        """What `pipeline(...)` gives for some rows; remembered per scheduler, unless another pipeline is given."""
        used = pipeline or self.pipeline
        scheduler = used.scheduler
        key = (setting.name, output_type, tuple(rows), steps, id(scheduler))
        if pipeline is None and key in self._results:
            return self._results[key][0]
        if self.case.alone and len(rows) > 1:
            single = [self.reference(setting, output_type, (row,), steps, pipeline) for row in rows]
            return _joined(single)
        arguments: dict[str, Any] = {"prompt": [self.case.prompts[i] for i in rows]}
        if self.case.takes_negative:
            arguments["negative_prompt"] = [self.case.negatives[i] or "" for i in rows]
        arguments |= self.case.media_call([self.case.media[i] for i in rows])
        self.case.prepare(used, setting)
        with self.case.calling():
            output = self.case.invoke(
                used,
                **arguments,
                **self.fresh.size_arguments(*self.case.size),
                num_inference_steps=steps or self.case.steps,
                generator=generators([SEEDS[i] for i in rows]),
                output_type=output_type,
                **{**self.case.call, **setting.call},
            )
        result = self.case.output(output)
        if pipeline is None:
            self._results[key] = (result, scheduler)  # the scheduler is kept, so that its id stays its own
        return result

    @cached_property
    def schedulers(self) -> dict[str, Any]:
        """The pipeline's own scheduler and those of the case."""
        return {"own": self.pipeline.scheduler, **self.case.schedulers}

    @contextmanager
    def scheduled(self, scheduler: Any) -> Iterator[None]:
        """Gives both sides a scheduler: the pipeline this one, which it changes, the adapter a copy."""
        former = self.fresh.pipeline.scheduler, self.pipeline.scheduler
        self.fresh.pipeline.scheduler, self.pipeline.scheduler = copy.deepcopy(scheduler), scheduler
        try:
            yield
        finally:
            self.fresh.pipeline.scheduler, self.pipeline.scheduler = former

    def euler_counterpart(self, scheduler: Any) -> Any:
        """The scheduler that the ODE steps are compared with, from one that the pipeline has used."""
        if self.case.euler is not None:
            return self.case.euler(scheduler)
        return scheduler if type(scheduler) is FlowMatchEulerDiscreteScheduler else EulerOn().copy_grid(scheduler)


def _joined(results: Sequence[Any]) -> Any:
    """The results of single calls as one of all their rows: latents, latents by component, or lists of media."""
    if isinstance(results[0], Tensor):
        return torch.cat(list(results))
    if isinstance(results[0], Mapping):
        return {name: torch.cat([one[name] for one in results]) for name in results[0]}
    return [item for one in results for item in one]


def _one_rollout(outputs: Sequence[RolloutOutput]) -> RolloutOutput:
    """The states and media of several rollouts as those of one; without what is pinned, which rows may have more of."""
    first = outputs[0]
    trajectory = first.trajectory
    states = {index: _joined_states([out.trajectory.states[index] for out in outputs]) for index in trajectory.states}
    media = None if first.media is None else [medium for out in outputs for medium in out.media or ()]
    return RolloutOutput(Trajectory(first.grid, trajectory.noise_levels, states), media, first.grid)


def _joined_states(states: Sequence[LatentState]) -> LatentState:
    masks = states[0].masks
    names = [name for name in states[0] if name not in masks or bool(masks[name].any())]
    return LatentState.cat(
        [LatentState({n: s[n] for n in names}, {n: m for n, m in s.masks.items() if n in names}) for s in states]
    )


def set_path(mapping: dict[str, Any], path: str, value: Any) -> None:
    """Sets a dotted path."""
    *parents, last = path.split(".")
    for parent in parents:
        mapping = mapping.setdefault(parent, {})
    mapping[last] = value

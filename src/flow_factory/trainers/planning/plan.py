"""Plans a run: builds its adapter without weights, and asks it and the trainer what they need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import diffusers
import torch
import transformers

from flow_factory.data_utils.offline_train_data import blank_medium
from flow_factory.hparams import Arguments, plan_geometry
from flow_factory.hparams.geometry import Geometry
from flow_factory.models.components import autocast_dtype
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.shapes.runner import ShapeRuns, UnknownShapesError
from flow_factory.models.shapes.skeleton import build_skeleton
from flow_factory.samples import Condition
from flow_factory.trainers import setup
from flow_factory.trainers.functions import build_policy_loss
from flow_factory.trainers.planning import memory
from flow_factory.trainers.planning.costs import Batch, Costs
from flow_factory.trainers.planning.evaluations import (
    Algorithm,
    CycleFacts,
    Range,
    coupled,
    find_algorithm,
    rollout_rows,
)
from flow_factory.trainers.planning.inputs import Encodings, PromptSet, Starts, read_prompts, read_stored_examples
from flow_factory.trainers.planning.report import (
    Activations,
    CycleRows,
    EvaluationRows,
    MemoryPart,
    Place,
    RunPlan,
    counted,
    counted_media,
    unknown_part,
)
from flow_factory.trainers.registry import get_trainer_class
from flow_factory.trainers.rollouts import STORAGE_DTYPES, RolloutPlan, SDESteps, cycle_window

_MAX_CYCLES = 1000
_CPU = torch.device("cpu")
# Of a grid of which one time is looked at: one step is too few for some schedulers, and for a strength below 1.
_GRID_STEPS = 10


def plan_run(config: Arguments, device_type: str = "cpu") -> RunPlan:
    """What a run will need, from its configuration and the checkpoint's config files; no weights are loaded.

    Args:
        config: The configuration.
        device_type: Kind of device that each process has, "cpu" or "cuda". It need not be there.

    Raises:
        InputError: If the configuration does not hold, or a config file is missing.
    """
    with _quiet_libraries():
        return _Planner(settled_precision(config, device_type), device_type).plan()


def settled_precision(config: Arguments, device_type: str) -> Arguments:
    """The configuration with `mixed_precision: auto` as it will be on a device of that kind."""
    if config.mixed_precision != "auto":
        return config
    device = torch.device(device_type)
    if device.type == "cuda" and not torch.cuda.is_available():
        return replace(config, mixed_precision="bf16")  # every GPU since 2020 has it
    return replace(config, mixed_precision="no" if autocast_dtype("auto", device) is None else "bf16")


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Leaves out what the libraries say of single prompts (cut to the tokenizer's length): a run says it, too."""
    engines = (diffusers.utils.logging, transformers.utils.logging)
    before = [engine.get_verbosity() for engine in engines]
    for engine in engines:
        engine.set_verbosity_error()
    try:
        yield
    finally:
        for engine, level in zip(engines, before, strict=True):
            engine.set_verbosity(level)


def _frames(generation: Any) -> int | None:
    """Frames of what is made with these fields; None for pictures."""
    return getattr(generation, "num_frames", None)


class _Planner:
    def __init__(self, config: Arguments, device_type: str) -> None:
        self.config, self.device_type = config, device_type
        self.arguments: Any = config.training_args
        self.trainer_class = get_trainer_class(config.trainer_key)
        self.geometry: Geometry = plan_geometry(config)
        self.stored = None if self.generates else read_stored_examples(config)
        self.adapter = build_skeleton(config)
        self.components = memory.component_plans(self.adapter)
        self.parts: list[MemoryPart] = memory.parameter_parts(config, self.adapter, self.trainer_class, device_type)
        self.notes: list[str] = []
        self.algorithm, found_as = find_algorithm(self.trainer_class)
        if self.algorithm is None:
            self.notes.append(f"how {self.trainer_class.__name__} uses the network is not known here: rollouts only.")
        elif found_as is not self.trainer_class and not self.trainer_class.__module__.startswith("flow_factory."):
            assert found_as is not None
            self.notes.append(f"{self.trainer_class.__name__} is counted as a {found_as.__name__}.")
        self.runs = ShapeRuns(self.adapter)
        self.prompts: list[PromptSet] = read_prompts(config, self.adapter)
        if self.stored is not None:
            self.prompts.insert(0, self.stored[1])
        self.encodings = Encodings(self.runs, config.data_args.preprocessing_batch_size)

    @property
    def generates(self) -> bool:
        """Whether the trainer learns from what the model generates."""
        return self.config.training_args.execution_contract.generates

    def plan(self) -> RunPlan:
        cycles, activations = self._generated() if self.generates else self._offline()
        evaluations = [self._evaluation(prompts) for prompts in self.prompts if not prompts.training]
        self.parts += [self.encodings.working_part(), self.encodings.cache_part(self.prompts)]
        if not self.config.data_args.enable_preprocess:
            self.parts[-1] = MemoryPart("condition cache", 0, "disk", note="data.enable_preprocess is false")
        if self.encodings.problem:
            self.notes.append(f"sizes of encoded prompts are not known: {self.encodings.problem}")
        if any(part.estimate for part in self.parts):
            self.notes.append(
                "estimates (~) come from running the networks on shapes and counting the bytes of their tensors; the "
                "kernels' own workspaces and the allocator's losses come on top."
            )
        self.notes.append("not counted: reward models, and what the device's runtime takes for itself.")
        total = self._total_cycles()
        config = self.config
        return RunPlan(
            trainer=config.trainer_key,
            model=config.model_args.model_type,
            path=config.model_args.model_name_or_path,
            device=self.device_type,
            precision=memory.dtype_name(self.adapter.compute_dtype),
            processes=config.num_processes,
            finetune=config.model_args.finetune_type,
            components=self.components,
            memory=tuple(self.parts),
            activations=activations,
            unit="cycle" if self.generates else "epoch",
            cycles=tuple(cycles),
            total_cycles=total,
            evaluations=tuple(evaluations),
            evaluation_count=self._evaluation_count(total) if evaluations else 0,
            notes=tuple(self.notes),
        )

    # Generated samples ---------------------------------------------------------------------------------------------

    def _generated(self) -> tuple[list[CycleRows], Activations]:
        config = self.config
        steps = setup.resolve_steps(config, self.adapter)
        assert steps is not None
        self.geometry = setup.replan(config, self.geometry, steps)
        training = [prompts for prompts in self.prompts if prompts.training]
        plan = self._rollout_plan(steps, 0)
        rows = self.encodings.rows(training[0])
        costs = Costs(self.runs, self._batch(rows, 1, plan))
        guided = costs.on_grid(steps.grid, plan.guidance)
        facts = self._facts(costs, plan, guided)
        starts = Starts(config, self.geometry, training)  # also refuses a cycle that draws more prompts than there are
        cycles = [self._cycle(steps, number, guided, facts, starts) for number in range(self._counted_cycles())]
        self._sampling_parts(plan, rows, guided)
        self._stored_samples(plan, steps, len(cycles))
        step = max(plan.window or range(steps.grid.length), key=lambda index: guided[index])
        return cycles, self._activations(plan, rows, step)

    def _rollout_plan(self, steps: SDESteps, cycle: int) -> RolloutPlan:
        window = cycle_window(self.config.scheduler_args, steps, self.config.sde_seed, cycle)
        return setup.build_plan(self.config, self.adapter, steps, window)

    def _facts(self, costs: Costs, plan: RolloutPlan, guided: tuple[int, ...]) -> CycleFacts:
        """What the counts depend on, apart from the cycle's window."""
        arguments = self.arguments
        facts = CycleFacts(arguments, self.geometry, guided=guided, reference=guided)
        if arguments.paradigm == "coupled":
            scale = arguments.reference_guidance if hasattr(arguments, "reference_guidance") else None
            if scale is not None:
                guidance = self.adapter.guidance(scale, self.config.train_generation)
                facts = replace(facts, reference=costs.on_grid(plan.grid, guidance))
            by_sequence = "sequence_log_ratio" in build_policy_loss(self.config).needs
            return replace(facts, by_sequence=by_sequence)
        sampling = getattr(arguments, "time_sampling", None)
        if sampling is None:
            return facts
        plain = costs.at_training_times(sampling, plan.grid, plan.guidance.unguided()).high
        facts = replace(facts, plain=plain, guided_reference=Range.exactly(plain))
        scale = float(getattr(arguments, "kl_cfg", 1.0))
        if scale > 1:
            reference = costs.at_training_times(sampling, plan.grid, self.adapter.guidance(scale))
            facts = replace(facts, guided_reference=reference)
        return facts

    def _cycle(
        self, steps: SDESteps, cycle: int, guided: tuple[int, ...], facts: CycleFacts, starts: Starts
    ) -> CycleRows:
        plan = self._rollout_plan(steps, cycle)
        path = plan.path or range(steps.grid.length)
        number = starts.in_cycle(cycle) if plan.share_initial_noise else None
        rollout = rollout_rows(path, plan.window, guided, self.geometry.samples_per_cycle, number)
        if self.algorithm is None:
            return CycleRows(rollout, None, None)
        optimization = self.algorithm.count(replace(facts, window=plan.window))
        return CycleRows(rollout, optimization.frozen, optimization.trained)

    def _sampling_parts(self, plan: RolloutPlan, rows: list[Condition] | None, guided: Sequence[int]) -> None:
        """What a rollout holds: one prediction, and decoding."""
        batch = self._batch(rows, self.geometry.batch, plan)
        self._prediction_parts("rollout", batch, plan, max(range(len(guided)), key=lambda index: guided[index]))

    def _stored_samples(self, plan: RolloutPlan, steps: SDESteps, cycles: int) -> None:
        """The latents that a cycle's samples keep for training: both ends of stochastic steps, or the final ones."""
        arguments, geometry = self.arguments, self.geometry
        windows = [self._rollout_plan(steps, cycle).window for cycle in range(cycles)]
        kept = max(len({index + end for index in window for end in (0, 1)}) for window in windows) or 1
        state = self.adapter.prepare_latents(
            None, [torch.Generator().manual_seed(0)], plan.height, plan.width, plan.generation
        )
        elements = sum(x[0].numel() for _, x in state.items())
        per_sample = kept * elements * STORAGE_DTYPES[arguments.latent_storage_dtype or "fp32"].itemsize
        if plan.window and hasattr(arguments, "policy_loss"):
            # Means and velocities of the policy that sampled are kept in float32.
            stores = len(build_policy_loss(self.config).stores)
            per_sample += len(plan.window) * elements * torch.float32.itemsize * stores
        samples = geometry.samples_per_cycle // geometry.world_size
        place: Place = "host" if arguments.offload_samples_to_cpu and self.device_type != "cpu" else "device"
        which = "final latents" if not plan.window else f"up to {kept} latents"
        note = f"{which} of {counted(samples, 'sample')}"
        self.parts.append(MemoryPart("samples of a cycle", samples * per_sample, place, note=note))
        frames, size = _frames(plan.generation), (plan.height, plan.width)
        made = MemoryPart(
            "decoded samples",
            samples * (frames or 1) * 3 * math.prod(size),
            "host",
            estimate=True,
            note=f"{counted_media(samples, size, frames)}, a byte a value",
        )
        self.parts.append(made)

    def _prediction_parts(self, what: str, batch: Batch, plan: RolloutPlan, step: int) -> None:
        runs = self.runs
        times = plan.grid.times(step, batch.count, _CPU)
        note = counted_media(batch.count, (plan.height, plan.width), _frames(plan.generation))
        if batch.condition is None:
            self.parts.append(unknown_part(f"{what}: prediction", self.encodings.problem))
        else:
            self.parts.append(
                memory.traced_part(
                    f"{what}: prediction",
                    note,
                    lambda: runs.predict(batch.state, times, batch.condition, plan.guidance, train=False),
                )
            )
        final = self.adapter.finalize_state(batch.state, batch.condition, plan.grid)
        self.parts.append(memory.traced_part(f"{what}: VAE decode", note, lambda: runs.decode(final)))

    def _activations(self, plan: RolloutPlan, rows: list[Condition] | None, step: int) -> Activations:
        algorithm = self.algorithm or Algorithm(coupled, guided=self.arguments.paradigm == "coupled")
        count = algorithm.micro_batch(self.arguments, self.geometry)
        guidance = plan.guidance if algorithm.guided else plan.guidance.unguided()
        batch = self._batch(rows, count, plan)
        return self._training_part(batch, plan.grid.times(step, count, _CPU), guidance, algorithm.arms)

    def _training_part(self, batch: Batch, times: Any, guidance: GuidanceSpec, arms: int) -> Activations:
        """Traces the differentiated prediction both ways, and adds the configured one to the memory."""
        runs, configured = self.runs, self.arguments.enable_gradient_checkpointing

        def peak(checkpointing: bool) -> tuple[int, Any]:
            trace = runs.predict(batch.state, times, batch.condition, guidance, train=True, checkpointing=checkpointing)
            return trace.peak + (arms - 1) * trace.held, trace.blocks

        try:
            if batch.condition is None:
                raise UnknownShapesError(self.encodings.problem)
            plain, blocks = peak(False)
            again = peak(True)[0] if memory.has_checkpointing(runs) else None
            samples = batch.count * arms
            rows = runs.rows(batch.state, times, batch.condition, guidance) * arms
        except UnknownShapesError as error:
            self.parts.append(unknown_part("activations", str(error)))
            return Activations(0, problem=str(error))
        how = "with" if configured else "without"
        note = f"{counted(rows, 'row')} for {counted(samples, 'sample')}, {how} gradient checkpointing"
        size = again if configured else plain
        self.parts.append(MemoryPart("activations", size, always=False, estimate=True, note=note))
        return Activations(rows, plain, again, blocks)

    # Stored examples -----------------------------------------------------------------------------------------------

    def _offline(self) -> tuple[list[CycleRows], Activations]:
        if self.stored is None:
            problem = f"{self.trainer_class.__name__} reads data of its own"
            self.notes.append(f"{problem}: the length of an epoch is not known.")
            self.parts.append(unknown_part("activations", problem))
            return [], Activations(0, problem=problem)
        stored, prompts = self.stored
        arguments, config = self.arguments, self.config
        self.geometry = replace(self.geometry, optimized_batches=stored.batches_per_epoch)
        rows = self.encodings.rows(prompts)
        batch = Batch(self.runs, rows, stored.batch, prompts.size, config.train_generation)
        one = Batch(self.runs, rows, 1, prompts.size, config.train_generation)
        guidance = self.adapter.offline_guidance()
        sampling = arguments.time_sampling
        grid = setup.run_grid(self.adapter, _GRID_STEPS, *prompts.size, config.train_generation)
        plain = Costs(self.runs, one).at_training_times(sampling, grid, guidance).high
        facts = CycleFacts(arguments, self.geometry, plain=plain)
        cycle = CycleRows(0, None, None)
        if self.algorithm is not None:
            counted = self.algorithm.count(facts)
            cycle = CycleRows(0, counted.frozen, counted.trained)
        first = stored.entries[0]
        media = [blank_medium(replace(first, size=prompts.size))] * stored.batch
        note = counted_media(stored.batch, prompts.size, first.frames)
        self.parts.append(memory.traced_part("VAE encode", note, lambda: self.runs.encode_media(media)))
        arms = 1 if self.algorithm is None else self.algorithm.arms
        activations = self._training_part(batch, grid.times(0, stored.batch, _CPU), guidance, arms)
        return [cycle] * self._counted_cycles(), activations

    # Shared --------------------------------------------------------------------------------------------------------

    def _evaluation(self, prompts: PromptSet) -> EvaluationRows:
        """Rows of one evaluation of a dataset, and what it holds where that differs from a rollout."""
        config = self.config
        plan = setup.build_eval_plan(config, self.adapter, prompts.name)
        if config.eval_args.solver == "pipeline":
            state = self.adapter.prepare_latents(
                None, [torch.Generator().manual_seed(0)], plan.height, plan.width, plan.generation
            )
            grid = self.adapter.solver_grid(plan.num_inference_steps, state, None, plan.generation)
            plan = replace(plan, grid=grid)
        rows = self.encodings.rows(prompts)
        guided = Costs(self.runs, self._batch(rows, 1, plan)).on_grid(plan.grid, plan.guidance)
        step = max(range(len(guided)), key=lambda index: guided[index])
        batch = self._batch(rows, config.eval_args.per_device_batch_size, plan)
        self._prediction_parts(f"evaluation {prompts.name}", batch, plan, step)
        return EvaluationRows(prompts.name, len(prompts.records), sum(guided) * len(prompts.records))

    def _batch(self, rows: list[Condition] | None, count: int, plan: RolloutPlan) -> Batch:
        return Batch(self.runs, rows, count, (plan.height, plan.width), plan.generation, plan.grid)

    def _total_cycles(self) -> int | None:
        arguments = self.arguments
        updates = self.geometry.updates_per_cycle if self.generates else self._updates_per_epoch()
        ends = [] if arguments.max_epochs is None else [arguments.max_epochs]
        if arguments.max_steps is not None:
            ends.append(math.ceil(arguments.max_steps / updates))
        return min(ends) if ends else None

    def _updates_per_epoch(self) -> int:
        if self.stored is None:
            return 1
        return max(1, self.stored[0].batches_per_epoch * self.geometry.loss_terms // self.geometry.accumulation_steps)

    def _counted_cycles(self) -> int:
        total = self._total_cycles()
        return _MAX_CYCLES if total is None else min(total, _MAX_CYCLES)

    def _evaluation_count(self, total: int | None) -> int | None:
        every = self.config.eval_args.eval_freq
        return None if total is None else 1 + total // every + (total % every != 0)

"""Building a trainer's parts from the configuration, in the order that finds mistakes before it spends time."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flow_factory.contracts import ExecutionContract
from flow_factory.errors import InputError
from flow_factory.hparams import Arguments, DatasetEvalSpec
from flow_factory.hparams.cross_checks import check_world_size
from flow_factory.hparams.geometry import Geometry, plan_geometry
from flow_factory.samples import Grid
from flow_factory.scheduler.windows import steps_taken
from flow_factory.trainers.rollouts import STORAGE_DTYPES, RolloutPlan, SDESteps, cycle_window, resolve_sde_steps

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flow_factory.advantage.processor import AdvantageProcessor
    from flow_factory.checkpoints.checkpointer import Checkpointer
    from flow_factory.distributed import Comm
    from flow_factory.models.abc import BaseAdapter
    from flow_factory.models.ema import Ema
    from flow_factory.rewards.buffer import RewardBuffer
    from flow_factory.rewards.processor import RewardProcessor
    from flow_factory.tracking.tracker import Tracker
    from flow_factory.trainers.roles import RoleOptimizationCoordinator


def build_accelerator(config: Arguments) -> Accelerator:
    """accelerate's handle on devices, the process group and trackers. Precision is the adapter's business."""
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")


def build_comm(accelerator: Accelerator) -> Comm:
    """The process group that accelerate has initialised."""
    from flow_factory.distributed import Comm

    return Comm.current(accelerator.device)


def plan_run_geometry(config: Arguments, comm: Comm) -> Geometry:
    """Batches, groups and accumulation of this run.

    Raises:
        InputError: If the world size differs from the configuration, or the numbers do not fit together.
    """
    check_world_size(config, comm.world_size)
    return plan_geometry(config, comm.world_size)


def preflight(config: Arguments, contract: ExecutionContract) -> None:
    """Checks what needs imports but no model: rewards exist, take their parameters and fit the model's output; a model
    that is to learn from stored media can encode them.

    Raises:
        InputError: Naming the reward or the model.
    """
    from flow_factory.models.abc import BaseAdapter
    from flow_factory.models.registry import get_adapter_class
    from flow_factory.rewards.build import check_rewards, check_sample_class
    from flow_factory.trainers.functions import build_estimator, build_policy_loss
    from flow_factory.trainers.optim import learning_rate_schedule

    if getattr(config.training_args, "supervision", None) is not None:
        adapter_class = get_adapter_class(config.model_args.model_type)
        if adapter_class.encode_output_state is BaseAdapter.encode_output_state:
            raise InputError(
                f"model.model_type: {config.model_args.model_type!r} ({config.origins.place(('model', 'model_type'))}) "
                f"cannot encode its output media, which trainer {config.trainer_key!r} needs; use another model, or "
                f"define encode_output_state() in {adapter_class.__name__}."
            )
    sections = [config.reward_args] if contract.needs_rewards else []
    sections += [] if config.eval_reward_args is None else [config.eval_reward_args]
    for section in sections:
        check_rewards(section)
        check_sample_class(section, get_adapter_class(config.model_args.model_type).sample_class)
    if contract.needs_rewards:
        build_estimator(config)
    if hasattr(config.training_args, "policy_loss"):
        build_policy_loss(config)
    learning_rate_schedule(
        config.training_args.lr_scheduler, config.training_args.lr_warmup_steps, total_optimizer_steps(config, 1)
    )


def open_run(config: Arguments, comm: Comm, accelerator: Accelerator) -> tuple[Tracker, Path]:
    """Creates or reopens the run folder, and its tracker."""
    from flow_factory.tracking.run_folder import prepare_run_folder, release_run_folder
    from flow_factory.tracking.tracker import Tracker

    run_dir: Path | None = None
    with comm.together():
        if comm.is_main:
            run_dir = prepare_run_folder(config)
    folder = Path(comm.broadcast_object(None if run_dir is None else str(run_dir)))
    try:
        with comm.together():
            return Tracker(config, folder, accelerator), folder
    except BaseException:
        release_run_folder(folder)
        raise


def build_adapter(
    config: Arguments, comm: Comm, snapshots: Sequence[str] | Mapping[str, str], reference: bool
) -> tuple[BaseAdapter[Any], Ema | None]:
    """Loads the model, declares every copy of its weights, and prepares it; after that no variant can be added.

    Args:
        config: The configuration.
        comm: Process group.
        snapshots: The algorithm's own frozen copies, which start as the weights at the start of the run; names, or
            name to the device that holds a full copy.
        reference: Whether a reference policy is needed.

    Returns:
        The adapter, and the moving average if `train.ema_decay` is above 0.
    """
    from flow_factory.models.ema import Ema, EmaSchedule
    from flow_factory.models.registry import get_adapter_class

    arguments = config.training_args
    adapter = get_adapter_class(config.model_args.model_type)(config, comm)
    if reference:
        adapter.add_reference(getattr(arguments, "ref_param_device", "auto"))
    for name in snapshots:
        adapter.add_snapshot(name, device=snapshots[name] if isinstance(snapshots, Mapping) else "auto")
    ema = None
    if arguments.ema_decay > 0:
        schedule = EmaSchedule(arguments.ema_decay_schedule, arguments.ema_decay)
        ema = Ema(adapter.add_snapshot("ema", device=arguments.ema_device), schedule, arguments.ema_update_interval)
    adapter.prepare()
    return adapter, ema


def build_prompt_loader(
    config: Arguments, adapter: BaseAdapter, comm: Comm, geometry: Geometry
) -> tuple[Any, dict[str, Any]]:
    """The rollout loader over the configured prompt datasets."""
    from flow_factory.data_utils.loaders import build_prompt_loaders

    return build_prompt_loaders(config, adapter, comm, geometry)


def total_optimizer_steps(config: Arguments, steps_per_cycle: int | None) -> int | None:
    """Length of the run in optimizer steps, if it has an end that is known."""
    arguments = config.training_args
    ends = []
    if arguments.max_epochs is not None and steps_per_cycle is not None:
        ends.append(arguments.max_epochs * steps_per_cycle)
    ends += [] if arguments.max_steps is None else [arguments.max_steps]
    return min(ends) if ends else None


def updates_per_cycle(config: Arguments, geometry: Geometry, dataloader: Any) -> int | None:
    """Optimizer steps of a cycle: planned for generated samples, counted off the loader for stored examples.

    Returns:
        The number, or None if the loader does not tell its length and nothing depends on it.

    Raises:
        InputError: If a learning rate decays to the end of data epochs whose length the loader does not tell.
    """
    if config.training_args.execution_contract.generates:
        return geometry.updates_per_cycle
    try:
        return max(1, len(dataloader) * geometry.loss_terms // geometry.accumulation_steps)
    except TypeError:
        if config.training_args.max_steps is None and config.training_args.lr_scheduler != "constant":
            raise InputError(
                f"train.lr_scheduler: {config.training_args.lr_scheduler!r} decays to the end of the run, but the "
                f"training loader has no length; set train.max_steps, or use lr_scheduler: constant."
            ) from None
        return None


def build_roles(
    config: Arguments, adapter: BaseAdapter, geometry: Geometry, comm: Comm, dataloader: Any
) -> RoleOptimizationCoordinator:
    """One optimizer per trainable role, from the `optimizers:` entries (or the short form in `train:`)."""
    from flow_factory.trainers.optim import build_optimizers, learning_rate_schedule
    from flow_factory.trainers.roles import RoleOptimizationCoordinator, RoleOptimizer

    roles = {}
    total = total_optimizer_steps(config, updates_per_cycle(config, geometry, dataloader))
    for role in type(config.training_args).required_trainable_roles:
        entry = config.optimizer_for(role)
        parameters = adapter.trainable_parameters(role)
        roles[role] = RoleOptimizer(
            role=role,
            parameters=parameters,
            optimizers=build_optimizers(entry, parameters),
            schedule=learning_rate_schedule(entry.lr_scheduler, entry.lr_warmup_steps, total),
            base_lr=entry.learning_rate,
            max_grad_norm=entry.max_grad_norm,
            parallel=adapter.parallel,
            comm=comm,
            use_grad_scaler=adapter.compute_dtype == torch.float16,
        )
    return RoleOptimizationCoordinator(roles)


def build_reward_processor(
    config: Arguments, comm: Comm, run_dir: Path, geometry: Geometry | None = None
) -> RewardProcessor:
    """Scores samples with `rewards`; without a geometry with `eval_rewards`, one sample per prompt."""
    from flow_factory.data_utils.samplers import is_rank_local
    from flow_factory.rewards.processor import RewardProcessor

    return RewardProcessor(
        config.eval_reward_args if geometry is None else config.reward_args,
        comm,
        str(comm.device),
        artifact_dir=run_dir / "failed_samples",
        sources=[source.name for source in config.data_args.sources()],
        groups_are_local=geometry is None or is_rank_local(geometry.sampler),
        group_size=None if geometry is None else geometry.group_size,
    )


def build_reward_buffer(config: Arguments, geometry: Geometry, comm: Comm, run_dir: Path) -> RewardBuffer:
    """Buffers a cycle's samples and scores them, during the rollout where a reward is asynchronous."""
    from flow_factory.rewards.buffer import RewardBuffer

    return RewardBuffer(build_reward_processor(config, comm, run_dir, geometry))


def build_advantage_processor(config: Arguments, comm: Comm) -> AdvantageProcessor:
    """Gathers rewards over ranks and turns them into advantages."""
    from flow_factory.advantage.processor import AdvantageProcessor

    arguments: Any = config.training_args
    return AdvantageProcessor(
        getattr(arguments, "advantage_aggregation", "gdpo"),
        params=getattr(arguments, "advantage_params", {}),
        inherited=vars(arguments),
        gather=comm,
        group_size=arguments.group_size,
        place=config.origins.place(("train", "advantage_params")),
    )


def run_grid(adapter: BaseAdapter[Any], num_steps: int, height: int, width: int, generation: Any = None) -> Grid:
    """The grid of rollouts of this size. Its shift may depend on the latents' shape, never on their values."""
    state = adapter.prepare_latents(None, [torch.Generator().manual_seed(0)], height, width, generation)
    return adapter.sigma_grid(num_steps, state, None, generation)


def resolve_steps(config: Arguments, adapter: BaseAdapter[Any]) -> SDESteps | None:
    """The run's grid and the steps of it that may be stochastic; None for dataset trainers, which roll nothing out."""
    arguments: Any = config.training_args
    if not arguments.execution_contract.generates:
        return None
    grid = run_grid(adapter, arguments.num_inference_steps, *arguments.resolution)
    steps = resolve_sde_steps(config.scheduler_args, grid)
    if steps.exceeding and config.scheduler_args.sde_steps is not None:
        logger.warning(
            "scheduler.sde_steps: steps %s would add more noise than the level they step to holds (noise_level %s)",
            list(steps.exceeding),
            config.scheduler_args.noise_level,
        )
    return steps


def replan(config: Arguments, geometry: Geometry, steps: SDESteps | None) -> Geometry:
    """The geometry once the grid is known: `num_sde_steps: null` trains every candidate step.

    Where training times are steps of the grid, their number is its length's, which is not always num_inference_steps.
    """
    sampling = getattr(config.training_args, "time_sampling", None)
    if steps is not None and sampling is not None:
        return plan_geometry(config, geometry.world_size, loss_terms=max(sampling.num_times(steps.grid.length), 1))
    if steps is None or config.training_args.paradigm != "coupled":
        return geometry
    # Also the moment to learn that no such window exists, before prompts are encoded.
    window = cycle_window(config.scheduler_args, steps, config.sde_seed, 0)
    if config.scheduler_args.num_sde_steps is not None:
        return geometry
    return plan_geometry(config, geometry.world_size, loss_terms=len(window))


def describe_run(
    config: Arguments,
    adapter: BaseAdapter[Any],
    geometry: Geometry,
    steps: SDESteps | None,
    comm: Comm,
    run_dir: Path,
) -> list[str]:
    """Lines about what was resolved, which are also saved as `resolved.json` in the run folder."""
    from flow_factory.checkpoints.atomic import atomic_write_json

    trained = sum(p.numel() for r in adapter.weights.roles.values() for p in r.values())
    # Frozen LoRA adapters (reference, EMA) live in the components too, but they are copies and not the model.
    copies = sum(v.numel() for s in adapter.weights.snapshots.values() for v in s.values.values())
    held = sum(p.numel() for name in adapter.trained_components for p in adapter.bundle.component(name).parameters())
    total = held - (copies if config.model_args.finetune_type == "lora" else 0)
    resolved: dict[str, Any] = {"trained_parameters": trained, "parameters_of_trained_components": total}
    lines = [f"training {trained:,} of {total:,} parameters ({config.model_args.finetune_type})"]
    if steps is not None:
        resolved["sigmas"] = steps.grid.primary.tolist()
        lines += geometry.describe().splitlines()
    if steps is not None and config.training_args.paradigm == "coupled":
        scheduler = config.scheduler_args
        resolved |= {"sde_candidates": list(steps.candidates), "sde_steps_exceeding": list(steps.exceeding)}
        count = scheduler.num_sde_steps or len(steps.candidates)
        lines.append(
            f"steps: {steps.grid.length} ({scheduler.dynamics_type}, noise {scheduler.noise_level}); {count} "
            f"stochastic per cycle ({scheduler.sde_window}) of {list(steps.candidates)}"
        )
        if scheduler.outside_solver != "euler":
            share = scheduler.after_window_fraction
            taken = "" if share == 1 else f", {share:g} of the steps after the last stochastic one"
            lines.append(f"deterministic steps: {scheduler.outside_solver}{taken}")
        if getattr(config.training_args, "share_initial_noise", False):
            lines.append("initial noise: one per group; steps before the first stochastic one once per prompt")
    if comm.is_main:
        atomic_write_json(run_dir / "resolved.json", resolved)
    return lines


def build_plan(config: Arguments, adapter: BaseAdapter, steps: SDESteps, window: tuple[int, ...]) -> RolloutPlan:
    """The rollout of a cycle whose stochastic steps are `window`."""
    arguments: Any = config.training_args
    scheduler = config.scheduler_args
    eta = scheduler.noise_level
    return RolloutPlan(
        grid=steps.grid,
        candidates=steps.candidates,
        window=window,
        noise_levels=tuple(eta if i in window else 0.0 for i in range(steps.grid.length)),
        guidance=adapter.guidance(arguments.guidance_scale, config.train_generation),
        generation=config.train_generation,
        num_inference_steps=arguments.num_inference_steps,
        height=arguments.resolution[0],
        width=arguments.resolution[1],
        dynamics=scheduler.dynamics_type,
        log_prob_normalised=scheduler.log_prob_normalised,
        storage_dtype=STORAGE_DTYPES[arguments.latent_storage_dtype or "fp32"],
        path=steps_taken(steps.grid.length, window, scheduler.after_window_fraction) if window else None,
        outside_solver=scheduler.outside_solver,
        share_initial_noise=getattr(arguments, "share_initial_noise", False),
    )


def build_eval_plan(config: Arguments, adapter: BaseAdapter[Any], dataset: str | None) -> RolloutPlan:
    """How an evaluation set is sampled: `eval:`, with the dataset's own resolution, steps and guidance over it.

    Args:
        config: The configuration.
        adapter: The model, which knows the grid.
        dataset: Name of the dataset; None is for prompts of no dataset: `eval:` alone.
    """
    arguments = config.eval_args
    spec = _eval_spec(config, dataset)
    height, width = spec.resolution or arguments.resolution
    num_steps = spec.num_inference_steps or arguments.num_inference_steps
    grid = run_grid(adapter, num_steps, height, width, config.eval_generation)
    return RolloutPlan(
        grid=grid,
        candidates=(),
        window=(),
        noise_levels=(0.0,) * grid.length,
        guidance=adapter.guidance(eval_guidance_scale(config, dataset), config.eval_generation),
        generation=config.eval_generation,
        num_inference_steps=num_steps,
        height=height,
        width=width,
        dynamics="ODE",
        log_prob_normalised=True,
        storage_dtype=torch.float32,
    )


def eval_guidance_scale(config: Arguments, dataset: str | None) -> float:
    """The guidance scale, as a user gives it, of a dataset's evaluation; None is for prompts of no dataset."""
    scale = _eval_spec(config, dataset).guidance_scale
    return config.eval_args.guidance_scale if scale is None else scale


def _eval_spec(config: Arguments, dataset: str | None) -> DatasetEvalSpec:
    source = next((s for s in config.data_args.sources() if s.name == dataset), None)
    return (None if source is None else source.eval) or DatasetEvalSpec()


def build_checkpointer(config: Arguments, run_dir: Path, comm: Comm) -> Checkpointer:
    """Writes and reads the run's checkpoints."""
    from flow_factory.checkpoints.checkpointer import Checkpointer

    return Checkpointer(run_dir / "checkpoints", comm, config.log_args.save_total_limit)


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)

"""`flow-factory check CFG --dry-run`: builds everything and runs one tiny cycle, to fail now, not tonight."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flow_factory.errors import InputError, RunError

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments
    from flow_factory.samples import BaseSample
    from flow_factory.trainers.abc import BaseTrainer

# In reduced precision, half the clip range is the largest deviation that leaves the clip its meaning. In float32 the
# kernel is the same and gives exactly 1, but for the last bits of elements that vectorised operations round otherwise
# where a row lies elsewhere in the batch. CPS divides by small deviations, which magnify them.
_FLOAT32, _FLOAT32_CPS = 1e-6, 2e-5


@dataclass
class DryRunReport:
    """What one tiny cycle showed.

    Attributes:
        first_ratio_deviation: max |rho - 1| of the first update of a coupled trainer, or None.
        param_change_norm: L2 norm of the first update's change of the parameters.
        rollout_change: Largest difference between the final latents of the same prompts and noise before and after;
            None for trainers on stored examples, which roll nothing out.
        rewards: Reward name ("eval_rewards <name>" of those) to its scores of a blank and of a noise picture.
        geometry: Describes groups, batches and accumulation of the *full* run.
        tied_rewards: True if the tiny groups had equal rewards, so that made-up advantages tested the update.
    """

    first_ratio_deviation: float | None = None
    param_change_norm: float = 0.0
    rollout_change: float | None = None
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    geometry: str = ""
    tied_rewards: bool = False


def run_dry(config: Arguments) -> DryRunReport:
    """Builds the run in a temporary folder, smoke-tests every reward and runs one cycle with groups of two.

    A trainer on stored examples makes one update.

    Raises:
        RunError: If the first ratio is not 1, or parameters or rollouts do not move.
    """
    from flow_factory.hparams.geometry import plan_geometry
    from flow_factory.trainers.build import build_trainer

    report = DryRunReport(geometry=plan_geometry(config, config.num_processes).describe())
    with tempfile.TemporaryDirectory(prefix="flow-factory-dry-") as folder:
        trainer = build_trainer(shrink(config, Path(folder)))
        _smoke_rewards(trainer, Path(folder), report)
        if trainer.reward_buffer is not None:
            trainer.prepare_feedback = _untie(trainer, report)  # type: ignore[method-assign]
        generates = trainer.execution_contract.generates
        before = _probe(trainer) if generates else []
        trainer.start()
        if generates:
            after = _probe(trainer)
            report.rollout_change = max(float((b - a).abs().max()) for b, a in zip(before, after, strict=True))
        report.first_ratio_deviation = trainer._cycle_metrics.get("first_update/ratio_deviation_max")
        report.param_change_norm = trainer._cycle_metrics.get("first_update/param_change_norm", 0.0)
        exact = str(trainer.adapter.compute_dtype) == "torch.float32" and trainer.device.type == "cpu"
    _judge(report, config, exact)
    return report


def _smoke_rewards(trainer: BaseTrainer, folder: Path, report: DryRunReport) -> None:
    """Tries the training rewards and those of the evaluation."""
    from flow_factory.rewards.smoke import smoke_reward
    from flow_factory.trainers.setup import build_reward_processor

    facts: dict[str, Any] = {"sample_class": trainer.adapter.sample_class}
    if trainer.execution_contract.generates:
        record = next(iter(trainer.dataloader)).records[0]
        facts |= {"prompt": record.prompt, "metadata": record.metadata}
    if trainer.reward_buffer is not None:
        processor = trainer.reward_buffer.processor
        processor.artifact_dir = None  # the folder goes with the dry run: nothing would be left of a saved sample
        for name, model in processor.models.items():
            report.rewards[name] = smoke_reward(model, processor=processor, **facts)
    if trainer.config.eval_reward_args is not None:
        processor = build_reward_processor(trainer.config, trainer.comm, folder)
        processor.artifact_dir = None
        try:
            for name, model in processor.models.items():
                report.rewards[f"eval_rewards {name}"] = smoke_reward(model, processor=processor, **facts)
        finally:
            processor.close()


def shrink(config: Arguments, folder: Path) -> Arguments:
    """The same run as one cycle of the fewest groups of two that its geometry allows, in one process."""
    from flow_factory.hparams import load_config_from_mapping
    from flow_factory.hparams.geometry import plan_geometry

    base: dict[str, Any] = config.to_mapping()
    base["num_processes"] = 1
    base["eval"]["eval_freq"] = 0
    base["log"].update(save_dir=str(folder), run_name="dry-run", logging_backend="none", save_freq=0, verbose=False)
    base["train"].update(resume="never", lr_warmup_steps=0)
    if not config.training_args.execution_contract.generates:
        base["train"].update(max_epochs=1, max_steps=1, gradient_accumulation_steps=1)
        return load_config_from_mapping(base, origin="the dry run")
    base["train"].update(
        max_epochs=1,
        max_steps=None,
        group_size=2,
        gradient_step_per_epoch=1,
        gradient_accumulation_steps="auto",
        num_inner_epochs=1,
        per_device_batch_size=min(2, config.training_args.per_device_batch_size),
    )
    for dataset in base["data"]["datasets"] or []:
        if dataset["train"] is not None:
            dataset["train"].update(unique_sample_num_per_epoch=None, num_batches_per_epoch=None, weight=1)
    error: InputError | None = None
    for prompts in range(1, 65):
        base["train"]["unique_sample_num_per_epoch"] = prompts
        try:
            small = load_config_from_mapping(base, origin="the dry run")
            plan_geometry(small, 1)
            return small
        except InputError as raised:
            error = raised
    assert error is not None
    raise error


def _untie(trainer: BaseTrainer, report: DryRunReport) -> Callable[[list[BaseSample]], None]:
    """The trainer's own feedback; where it leaves every advantage at 0, advantages of +1 and -1 stand in."""
    prepare = trainer.prepare_feedback

    def feedback(samples: list[BaseSample]) -> None:
        prepare(samples)
        if all(not s.advantage for s in samples):
            report.tied_rewards = True
            for sample in samples:
                sample.advantage = 1.0 if sample.member % 2 == 0 else -1.0

    return feedback


def _probe(trainer: BaseTrainer) -> list[Any]:
    """Final latents of the first cycle's prompts and noise under the present weights."""
    progress = trainer.progress
    trainer.progress = type(progress)()
    trainer._plan = None
    samples = trainer.generate_samples(trajectory_indices=(-1,))
    trainer.progress, trainer._plan = progress, None
    return [x.float().cpu() for s in samples for state in s.trajectory.states.values() for _, x in state.items()]


def _judge(report: DryRunReport, config: Arguments, exact: bool) -> None:
    deviation = report.first_ratio_deviation
    if deviation is not None:
        clip: Any = getattr(config.training_args, "clip_range", (-1e-4, 1e-4))
        rounding = _FLOAT32_CPS if config.scheduler_args.dynamics_type == "CPS" else _FLOAT32
        limit = rounding if exact else 0.5 * min(abs(clip[0]), abs(clip[1]))
        if deviation > limit:
            raise RunError(
                f"the first on-policy ratio deviates from 1 by {deviation:.3g} (allowed: {limit:.3g}): replay does not "
                f"compute what the rollout computed. Does the adapter draw randomness in its forward?"
            )
    if report.param_change_norm == 0.0:
        raise RunError("one update changed no parameter: check train.learning_rate and model.target_modules.")
    if report.rollout_change == 0.0:
        raise RunError(
            "parameters moved but the same prompts and noise give the same latents: the trained weights take no part "
            "in the rollout."
        )

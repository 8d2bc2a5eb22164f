"""Rules that span fields for algorithms that noise the final latents again; part of `cross_checks`."""

from __future__ import annotations

import dataclasses

from flow_factory.hparams.arguments import Arguments
from flow_factory.hparams.errors import Add
from flow_factory.hparams.geometry import Geometry
from flow_factory.hparams.training_args import DecoupledTrainingArguments, DPOTrainingArguments, NFTTrainingArguments

_DEFAULT_DECAY = next(f.default for f in dataclasses.fields(NFTTrainingArguments) if f.name == "old_model_decay")


def check_decoupled(config: Arguments, add: Add) -> None:
    """Rules that need no geometry.

    Args:
        config: A configuration whose single fields are valid.
        add: Receives path and message of everything that does not fit together.
    """
    args = config.training_args
    if not isinstance(args, DecoupledTrainingArguments):
        return
    _check_times(args, add)
    if isinstance(args, NFTTrainingArguments) and not args.off_policy and args.old_model_decay != _DEFAULT_DECAY:
        add(
            ("train", "old_model_decay"),
            "has no effect on-policy, where the old policy is the live one at the start of each cycle; remove it, or "
            "set off_policy: true.",
        )


def check_decoupled_geometry(config: Arguments, geometry: Geometry, add: Add) -> None:
    """Rules on how groups lie in batches and updates."""
    args = config.training_args
    if isinstance(args, DPOTrainingArguments) and geometry.world_size > 1 and geometry.sampler != "group_contiguous":
        add(
            ("data", "sampler_type"),
            f"{geometry.sampler} spreads a group over ranks, but trainer 'dpo' pairs the best with the worst sample of "
            f"a group on one rank: use sampler_type group_contiguous, with a train.unique_sample_num_per_epoch "
            f"({geometry.unique}) that is a multiple of the {geometry.world_size} ranks, and a per_device_batch_size "
            f"({geometry.batch}) that divides a rank's share of samples.",
        )
    if not getattr(args, "couples_groups", False) or geometry.accumulation_steps % geometry.optimized_batches == 0:
        return
    if args.gradient_accumulation_steps != "auto":
        add(
            ("train", "gradient_accumulation_steps"),
            f"is {geometry.accumulation_steps}, which falls between members of a group: one training time of all "
            f"{geometry.optimized_batches} batches belongs together for trainer {config.trainer_key!r}. Use auto, or a "
            f"multiple of {geometry.optimized_batches}.",
        )
        return
    times = geometry.loss_terms
    divisors = [n for n in range(1, times + 1) if times % n == 0]
    add(
        ("train", "gradient_step_per_epoch"),
        f"is {geometry.updates_per_cycle // args.num_inner_epochs} updates of {geometry.accumulation_steps} backward "
        f"passes, which fall between members of a group: one training time of all {geometry.optimized_batches} batches "
        f"belongs together for trainer {config.trainer_key!r}. Use a divisor of the {times} training times "
        f"({', '.join(map(str, divisors))}), or change num_train_timesteps.",
    )


def _check_times(args: DecoupledTrainingArguments, add: Add) -> None:
    sampling, steps = args.time_sampling, args.num_inference_steps
    available = sampling.steps(steps)
    if sampling.num_times(steps) == 0:
        low, high = sampling.timestep_range
        add(
            ("train", "timestep_range"),
            f"[{low:g}, {high:g}] holds none of the {steps} steps of the rollout that {sampling.strategy!r} may train "
            f"(indices int({steps} x {low:g}) to int({steps} x {high:g}) - 1); widen it or raise num_inference_steps.",
        )
    elif args.distinct_times and sampling.discrete and sampling.count > len(available):
        add(
            ("train", "num_train_timesteps"),
            f"is {sampling.count}, but timestep_range holds {len(available)} steps and trainer {args.trainer_type!r} "
            f"draws them without replacement; use at most {len(available)}, or 0 for all.",
        )

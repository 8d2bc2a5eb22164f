"""How many batches, backward passes and optimizer steps a cycle has, and whether the numbers can hold.

W ranks, B samples per device batch, K samples per prompt (group), M prompts per cycle, G optimizer steps per pass.
Nothing is rounded or padded: where the numbers cannot hold, the error says which would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flow_factory.hparams.data_args import SAMPLER_ALIASES, CanonicalSampler
from flow_factory.hparams.errors import ConfigError, Problem
from flow_factory.hparams.training_args import OfflineFlowMatchingTrainingArguments, TrainingArguments

if TYPE_CHECKING:
    from flow_factory.hparams.arguments import Arguments


@dataclass(frozen=True)
class Geometry:
    """The counts of one cycle.

    Attributes:
        world_size: W, ranks.
        batch: B, samples per rank and batch.
        group_size: K, samples per prompt.
        unique: M, prompts per cycle over all ranks.
        batches_per_cycle: Batches per rank and cycle, M K / (W B).
        optimized_batches: Micro-batches per rank and pass that are trained; fewer where a loss takes only some samples.
        loss_terms: Backward passes per batch (trained steps or training times).
        accumulation_steps: Backward passes per optimizer step.
        updates_per_cycle: Optimizer steps per cycle, inner epochs included.
        sampler: How groups are dealt to ranks.
        per_source: Prompts per cycle by dataset name.
    """

    world_size: int
    batch: int
    group_size: int
    unique: int
    batches_per_cycle: int
    loss_terms: int
    accumulation_steps: int
    updates_per_cycle: int
    sampler: CanonicalSampler
    per_source: dict[str, int] = field(default_factory=dict)
    optimized_batches: int = 1

    @property
    def batch_size(self) -> int:
        """B, samples per rank and batch."""
        return self.batch

    @property
    def samples_per_cycle(self) -> int:
        """Samples per cycle over all ranks."""
        return self.unique * self.group_size

    def describe(self) -> str:
        """Three lines for people."""
        prompts = f"{self.unique} prompts"
        if len(self.per_source) > 1:
            prompts += f" ({', '.join(f'{name} {count}' for name, count in self.per_source.items())})"
        lines = [
            f"cycle: {prompts} x {self.group_size} samples = {self.samples_per_cycle} samples",
            f"processes: {self.world_size}, each {self.batches_per_cycle} batches of {self.batch} ({self.sampler})",
            f"training: {self.optimized_batches} batches x {self.loss_terms} loss terms; "
            f"{self.accumulation_steps} backward passes per optimizer step, {self.updates_per_cycle} optimizer steps "
            f"per cycle",
        ]
        return "\n".join(lines)


def plan_geometry(config: Arguments, world_size: int | None = None, *, loss_terms: int | None = None) -> Geometry:
    """Plans a cycle.

    Args:
        config: The configuration.
        world_size: W; None means `config.num_processes`.
        loss_terms: Backward passes per batch where they are known better than from the configuration alone
            (`num_sde_steps: null` depends on the model's grid).

    Raises:
        ConfigError: If the numbers cannot hold, with the numbers that would.
    """
    problems: list[Problem] = []
    geometry = find_geometry(config, world_size, problems, loss_terms=loss_terms)
    if geometry is None:
        raise ConfigError(problems)
    return geometry


def find_geometry(
    config: Arguments, world_size: int | None, problems: list[Problem], *, loss_terms: int | None = None
) -> Geometry | None:
    """As `plan_geometry`, but collects problems; None if there are any."""
    world = config.num_processes if world_size is None else world_size
    args = config.training_args
    if isinstance(args, OfflineFlowMatchingTrainingArguments):
        terms = args.loss_terms_per_batch(config.scheduler_args)
        steps = int(args.gradient_accumulation_steps) * terms
        batch = args.per_device_batch_size
        return Geometry(world, batch, 1, batch * world, 1, terms, steps, 1, "distributed_k_repeat")
    planner = _Planner(config, args, world, problems)
    return planner.plan(args.loss_terms_per_batch(config.scheduler_args) if loss_terms is None else loss_terms)


class _Planner:
    def __init__(self, config: Arguments, args: TrainingArguments, world: int, problems: list[Problem]) -> None:
        self.config, self.args, self.world, self.problems = config, args, world, problems
        self.batch, self.group, self.unique = (
            args.per_device_batch_size,
            args.group_size,
            args.unique_sample_num_per_epoch,
        )
        self.auto = args.gradient_accumulation_steps == "auto"
        # An explicit accumulation fixes the optimizer steps itself; M then only has to fill whole batches. So it does
        # where an update may end between two loss terms of a batch.
        self.steps = args.gradient_step_per_epoch if self.auto and args.updates_take_whole_batches else 1

    def plan(self, loss_terms: int) -> Geometry | None:
        before = len(self.problems)
        per_source = self._per_source()
        if per_source is None:
            return None
        sampler = self._sampler(per_source)
        if sampler is None:
            return None
        batches = self.unique * self.group // (self.world * self.batch)
        optimized = self.args.optimized_batches(batches, self.world)
        terms = optimized * loss_terms
        accumulation = self._accumulation(optimized, loss_terms)
        self._check_given_batches(per_source)
        if accumulation is None or len(self.problems) > before:
            return None
        return Geometry(
            world_size=self.world,
            batch=self.batch,
            group_size=self.group,
            unique=self.unique,
            batches_per_cycle=batches,
            loss_terms=loss_terms,
            accumulation_steps=accumulation,
            updates_per_cycle=terms // accumulation * self.args.num_inner_epochs,
            sampler=sampler,
            per_source=per_source,
            optimized_batches=optimized,
        )

    def _per_source(self) -> dict[str, int] | None:
        sources = self.config.data_args.train_sources()
        if not sources:
            self._problem(("data", "datasets"), "no dataset is enabled for training; enable at least one.")
            return None
        specs = {source.name: source.train for source in sources}
        explicit = {n: s.unique_sample_num_per_epoch for n, s in specs.items() if s is not None}
        given = {name: count for name, count in explicit.items() if count is not None}
        if given and len(given) < len(specs):
            missing = [name for name in specs if name not in given]
            self._problem(
                ("data", "datasets"),
                f"unique_sample_num_per_epoch is given for {', '.join(given)} but not for {', '.join(missing)}; give "
                f"it for all datasets, or for none and use weights.",
            )
            return None
        if given:
            if sum(given.values()) != self.unique:
                self._problem(
                    ("train", "unique_sample_num_per_epoch"),
                    f"is {self.unique}, but those of the datasets add up to {sum(given.values())}; make them equal.",
                )
                return None
            return given
        weights = {name: spec.weight for name, spec in specs.items() if spec is not None}
        total = sum(weights.values())
        if self.unique % total:
            self._problem(
                ("train", "unique_sample_num_per_epoch"),
                f"is {self.unique}, but must be a multiple of {total}, the sum of the datasets' weights "
                f"({', '.join(f'{n} {w}' for n, w in weights.items())}); use {_around(self.unique, total)}.",
            )
            return None
        return {name: self.unique * weight // total for name, weight in weights.items()}

    def _sampler(self, per_source: Mapping[str, int]) -> CanonicalSampler | None:
        asked = self.config.data_args.sampler_type
        asynchronous = [r.name for r in self.config.reward_args.reward_configs if r.async_reward]
        if asked != "auto":
            sampler = SAMPLER_ALIASES[asked]
            if asynchronous and sampler != "group_contiguous":
                self._problem(
                    ("data", "sampler_type"),
                    f"is {asked!r}, but the reward {asynchronous[0]!r} is asynchronous and needs complete groups on a "
                    f"rank; use group_contiguous or auto, or async_reward: false.",
                )
                return None
            return sampler if self._holds(sampler, per_source) else None
        if not self._complaints("group_contiguous", per_source):
            return "group_contiguous"
        if asynchronous:
            self._holds("group_contiguous", per_source)
            return None
        return "distributed_k_repeat" if self._holds("distributed_k_repeat", per_source) else None

    def _holds(self, sampler: CanonicalSampler, per_source: Mapping[str, int]) -> bool:
        complaints = self._complaints(sampler, per_source)
        if complaints:
            self._problem(
                ("train", "unique_sample_num_per_epoch"),
                f"the numbers of a cycle cannot hold with sampler {sampler} ({self._numbers()}): "
                f"{'; '.join(complaints)}. {self._remedy(sampler, per_source)}",
            )
        return not complaints

    def _complaints(self, sampler: CanonicalSampler, per_source: Mapping[str, int]) -> list[str]:
        """What does not hold, for the whole cycle and for each source (a batch has one source)."""
        found = _group_complaints(sampler, self.world, self.batch, self.group, self.unique, self.steps, "M")
        if not found and len(per_source) > 1:
            for name, count in per_source.items():
                what = f"{name}'s prompts"
                found += _group_complaints(sampler, self.world, self.batch, self.group, count, 1, what)
        return found

    def _remedy(self, sampler: CanonicalSampler, per_source: Mapping[str, int]) -> str:
        shares = {name: count / self.unique for name, count in per_source.items()}

        def fits(
            world: int = self.world, batch: int = self.batch, group: int = self.group, unique: int = self.unique
        ) -> bool:
            if _group_complaints(sampler, world, batch, group, unique, self.steps, "M"):
                return False
            counts = [unique * share for share in shares.values()]
            if any(abs(count - round(count)) > 1e-9 or round(count) < 1 for count in counts):
                return False
            return len(counts) < 2 or not any(
                _group_complaints(sampler, world, batch, group, round(count), 1, "") for count in counts
            )

        options = [
            _candidates("unique_sample_num_per_epoch", self.unique, lambda n: fits(unique=n)),
            _candidates("per_device_batch_size", self.batch, lambda n: fits(batch=n)),
            _candidates("group_size", self.group, lambda n: n > 1 and fits(group=n)),
        ]
        found = [option for option in options if option]
        return f"These would: {', or '.join(found)}." if found else "Change num_processes or group_size."

    def _accumulation(self, batches: int, loss_terms: int) -> int | None:
        terms = batches * loss_terms
        steps = self.args.gradient_step_per_epoch
        numbers = f"{batches} batches x {loss_terms} loss terms = {terms} backward passes per cycle"
        if self.auto:
            if terms % steps:
                near = [n for n in range(1, terms + 1) if terms % n == 0]
                self._problem(
                    ("train", "gradient_step_per_epoch"),
                    f"is {steps}, but {numbers} cannot be divided into {steps} equal parts; use one of {near}.",
                )
                return None
            return terms // steps
        accumulation = int(self.args.gradient_accumulation_steps)
        if terms % accumulation:
            near = [n for n in range(1, terms + 1) if terms % n == 0]
            self._problem(
                ("train", "gradient_accumulation_steps"),
                f"is {accumulation}, but {numbers} cannot be divided by it; use auto or one of {near}.",
            )
            return None
        return accumulation

    def _check_given_batches(self, per_source: Mapping[str, int]) -> None:
        for index, source in enumerate(self.config.data_args.datasets or []):
            given = source.train.num_batches_per_epoch if source.train is not None else None
            if given is None or source.name not in per_source:
                continue
            derived = per_source[source.name] * self.group // (self.world * self.batch)
            if given != derived:
                self._problem(
                    ("data", "datasets", index, "train", "num_batches_per_epoch"),
                    f"is {given}, but {per_source[source.name]} prompts x {self.group} samples make {derived} batches; "
                    f"remove it, or change the dataset's unique_sample_num_per_epoch or weight.",
                )

    def _numbers(self) -> str:
        steps = f", gradient_step_per_epoch G={self.steps}" if self.auto else ""
        return (
            f"processes W={self.world}, per_device_batch_size B={self.batch}, group_size K={self.group}, "
            f"unique_sample_num_per_epoch M={self.unique}{steps}"
        )

    def _problem(self, path: tuple[str | int, ...], message: str) -> None:
        self.problems.append(Problem(path, message, self.config.origins.place(path)))


def _group_complaints(
    sampler: CanonicalSampler, world: int, batch: int, group: int, unique: int, steps: int, what: str
) -> list[str]:
    """The rules of a sampler that do not hold."""
    found: list[str] = []
    wide = world * batch
    if sampler == "group_distributed":
        if group % world:
            found.append(f"K={group} must be divisible by W={world}")
        if wide % group:
            found.append(f"W B={wide} must be divisible by K={group}")
    multiple = wide * steps // math.gcd(group, wide)
    if unique % multiple:
        found.append(f"{what}={unique} must be a multiple of {multiple} (W B G / gcd(K, W B))")
    if sampler == "group_contiguous":
        if unique % world:
            found.append(f"{what}={unique} must be divisible by W={world}")
        elif (unique // world) * group % batch:
            found.append(f"({what} / W) K={unique // world * group} must be divisible by B={batch}")
    return found


def _candidates(name: str, value: int, fits: Callable[[int], bool]) -> str:
    """`name 8 or 16`: the nearest numbers below and above that hold."""
    below = next((n for n in range(value - 1, 0, -1) if fits(n)), None)
    above = next((n for n in range(value + 1, value * 4 + 257) if fits(n)), None)
    near = [str(n) for n in (below, above) if n is not None]
    return f"{name} {' or '.join(near)}" if near else ""


def _around(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)

"""Rules that span fields or sections, checked before any model loads. All violations are reported together."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from flow_factory.errors import InputError
from flow_factory.hparams.arguments import OPTIMIZER_SHORT_FORM, Arguments
from flow_factory.hparams.decoupled_checks import check_decoupled, check_decoupled_geometry
from flow_factory.hparams.errors import Path, Problem, nearest
from flow_factory.hparams.geometry import find_geometry
from flow_factory.hparams.model_checks import check_model, no_stored_media
from flow_factory.hparams.training_args import TrainingArguments
from flow_factory.registry import Registry, load_plugins

_KNOWN_POLICY_LOSSES = ("grpo", "grpo-guard", "dppo", "gspo", "reinforce")
# These compare with earlier cycles, so a group may have a single member.
_WITHOUT_GROUPS = ("reinforce", "per_prompt")
_KNOWN_AGGREGATIONS = ("sum", "gdpo", "rloo", "best_of", "rank", "reinforce", "per_prompt")
# Field of `train:`, what selects the function that may take it, the built-in functions, and those that do.
_TAKEN_BY = (
    ("clip_range", "policy_loss", _KNOWN_POLICY_LOSSES, ("grpo", "grpo-guard", "gspo")),
    ("global_std", "advantage_aggregation", _KNOWN_AGGREGATIONS, ("sum",)),
    ("logit_mean", "weighting_scheme", ("logit_normal", "uniform"), ("logit_normal",)),
    ("logit_std", "weighting_scheme", ("logit_normal", "uniform"), ("logit_normal",)),
)


def cross_check(config: Arguments, given: Mapping[str, set[str]], problems: list[Problem]) -> None:
    """Collects everything that does not fit together.

    Args:
        config: A configuration whose single fields are valid.
        given: The fields that were written, by section.
        problems: Receives the problems.
    """
    check = _Checker(config, given, problems)
    check.dynamics()
    check.feedback()
    check.function_fields()
    check.rewards()
    check_model(config, check.add)
    check.processes()
    check.length()
    check.optimizers()
    check.acceleration()
    check.stored_examples()
    check.unavailable()
    check_decoupled(config, check.add)
    if not problems:
        geometry = find_geometry(config, None, problems)
        if geometry is not None:
            check_decoupled_geometry(config, geometry, check.add)


def check_world_size(config: Arguments, world_size: int) -> None:
    """Raises an InputError if the processes that a launcher started are not those of the configuration."""
    if world_size != config.num_processes:
        place = config.origins.place(("num_processes",))
        raise InputError(
            f"num_processes is {config.num_processes} ({place}), but the launcher started {world_size}. Group geometry "
            f"depends on it: set num_processes={world_size}, or start {config.num_processes} processes."
        )


class _Checker:
    def __init__(self, config: Arguments, given: Mapping[str, set[str]], problems: list[Problem]) -> None:
        self.config, self.given, self.problems = config, given, problems
        self.args = config.training_args

    def add(self, path: Path, message: str) -> None:
        self.problems.append(Problem(path, message, self.config.origins.place(path)))

    def dynamics(self) -> None:
        """Coupled trainers need transition densities on steps that exist."""
        scheduler, args = self.config.scheduler_args, self.args
        if scheduler.dynamics_type not in (*self.config.spec.dynamics, "ODE"):
            known = ", ".join(self.config.spec.dynamics)
            self.add(
                ("scheduler", "dynamics_type"),
                f"{scheduler.dynamics_type!r} is not defined for model {self.config.spec.key!r}; use one of {known}.",
            )
        if args.paradigm != "coupled" or not isinstance(args, TrainingArguments):
            return
        if scheduler.dynamics_type == "ODE":
            self.add(
                ("scheduler", "dynamics_type"),
                f"'ODE' has no transition density, which trainer {args.trainer_type!r} needs; use Flow-SDE, Dance-SDE "
                f"or CPS.",
            )
        elif scheduler.noise_level == 0:
            self.add(
                ("scheduler", "noise_level"),
                f"0 makes every step deterministic, but trainer {args.trainer_type!r} needs transition densities; use "
                f"for instance 0.7.",
            )
        spec, fields = self.config.spec, self.config.train_generation
        steps = spec.rollout_steps(args.num_inference_steps, fields)
        if steps < 2:
            self.add(
                ("train", "num_inference_steps"),
                f"is {args.num_inference_steps}; the last step is never stochastic, so trainer {args.trainer_type!r} "
                f"needs at least {spec.fewest_steps(2, fields)}.",
            )
            return
        late = [index for index in scheduler.sde_steps or [] if index > steps - 2]
        if late:
            self.add(
                ("scheduler", "sde_steps"),
                f"{late} cannot be stochastic: of {steps} steps the indices 0 to {steps - 2} can (the last never is).",
            )
        elif scheduler.num_sde_steps is not None and scheduler.num_sde_steps > steps - 1:
            self.add(
                ("scheduler", "num_sde_steps"),
                f"is {scheduler.num_sde_steps}, but of {steps} steps at most {steps - 1} can be stochastic (the last "
                f"never is); lower it or raise train.num_inference_steps.",
            )
        low, high = scheduler.sde_window_range or (0, steps - 1)
        room = min(high, steps - 1) - low
        if room < (scheduler.num_sde_steps or 1) <= steps - 1:
            self.add(
                ("scheduler", "sde_window_range"),
                f"[{low}, {high}) has room for {max(room, 0)} stochastic step(s) on a grid of {steps} (the last never "
                f"is), but num_sde_steps is {scheduler.num_sde_steps}; use a range inside [0, {steps - 1}).",
            )

    def feedback(self) -> None:
        """Rewards where a trainer wants them, and nowhere else."""
        contract, rewards = self.args.execution_contract, self.config.reward_args.reward_configs
        trainer = self.config.trainer_key
        if contract.needs_rewards and not rewards:
            self.add(
                ("rewards",),
                f"trainer {trainer!r} learns from rewards but none is given; add for instance "
                f"`rewards: {{reward_model: jpeg_compressibility}}` (flow-factory list rewards).",
            )
        if not contract.needs_rewards and rewards:
            self.add(
                ("rewards",), f"trainer {trainer!r} takes no rewards; remove them, or use eval_rewards for evaluation."
            )
        aggregation = getattr(self.args, "advantage_aggregation", "gdpo")
        grouped = contract.needs_rewards and aggregation not in _WITHOUT_GROUPS
        if grouped and isinstance(self.args, TrainingArguments) and self.args.group_size < 2:
            self.add(
                ("train", "group_size"),
                f"is {self.args.group_size}, so every advantage would be zero; samples of a prompt are compared with "
                f"each other: use at least 2.",
            )
        if aggregation not in _KNOWN_AGGREGATIONS and "." not in aggregation:
            self._registered(
                ("train", "advantage_aggregation"), aggregation, _KNOWN_AGGREGATIONS, "flow_factory.advantage"
            )
        loss = getattr(self.args, "policy_loss", "grpo")
        if loss not in _KNOWN_POLICY_LOSSES and "." not in loss:
            self._registered(("train", "policy_loss"), loss, _KNOWN_POLICY_LOSSES, "flow_factory.objectives")

    def _registered(self, path: Path, key: str, builtin: tuple[str, ...], package: str) -> None:
        """A key outside the built-in ones is right only if a plugin registered it, which loaded the package."""
        keys = _plugin_keys(package)
        if key.lower() in keys:
            return
        known = sorted({*builtin, *keys})
        close = nearest(key, known, cutoff=0.4)
        hint = f" Did you mean {close!r}?" if close else ""
        self.add(path, f"{key!r} is not one of {', '.join(map(repr, known))}, nor a dotted path.{hint}")

    def function_fields(self) -> None:
        """A field that only some of the functions take is not changed for one that does not."""
        for name, selector, builtin, takers in _TAKEN_BY:
            chosen = getattr(self.args, selector, None)
            if chosen not in builtin or chosen in takers or name not in self.given.get("train", set()):
                continue
            value = getattr(self.args, name)
            if value != _default(type(self.args), name):
                self.add(
                    ("train", name),
                    f"is {value}, but {selector} {chosen!r} does not take it, so it has no effect; remove it, or use "
                    f"{selector} {' or '.join(takers)}.",
                )

    def rewards(self) -> None:
        """Rewards refer to datasets that exist and can have an effect."""
        train_names = [source.name for source in self.config.data_args.train_sources()]
        all_names = [source.name for source in self.config.data_args.sources()]
        for section, names, rewards in (
            ("rewards", train_names, self.config.reward_args),
            ("eval_rewards", all_names, self.config.eval_reward_args),
        ):
            for index, reward in enumerate(rewards.reward_configs if rewards is not None else []):
                where = (section, index)
                self._dataset_names((*where, "applicable_datasets"), reward.applicable_datasets or [], all_names)
                if isinstance(reward.weight, dict):
                    self._dataset_names((*where, "weight"), list(reward.weight), all_names)
                    wanted = reward.applicable_datasets or []
                    missing = [name for name in wanted if name in all_names and name not in reward.weight]
                    if missing:
                        self.add(
                            (*where, "weight"), f"has no weight for {', '.join(missing)}, which the reward applies to."
                        )
            configs = rewards.reward_configs if rewards is not None else []
            if section == "rewards" and configs:
                for name in names:
                    if not any(reward.weight_for(name) for reward in configs):
                        self.add(
                            ("rewards",),
                            f"no reward with a weight other than 0 applies to the dataset {name!r}, so its samples "
                            f"would have no advantage; add one or disable the dataset's training.",
                        )

    def _dataset_names(self, path: Path, names: list[str], known: list[str]) -> None:
        for name in names:
            if name not in known:
                close = nearest(name, known, cutoff=0.4)
                hint = f" Did you mean {close!r}?" if close else ""
                self.add(path, f"there is no dataset {name!r}; known: {', '.join(map(repr, known))}.{hint}")

    def processes(self) -> None:
        """Processes and machines."""
        config = self.config
        machines = config.num_machines or 1
        if config.num_processes % machines:
            self.add(
                ("num_processes",),
                f"is {config.num_processes}, not a multiple of num_machines = {machines}; adjust one.",
            )
        elif config.gpus_per_node is not None and config.gpus_per_node * machines != config.num_processes:
            self.add(
                ("gpus_per_node",),
                f"{config.gpus_per_node} on {machines} machine(s) is not num_processes = {config.num_processes}.",
            )
        if config.machine_rank is not None and config.machine_rank >= machines:
            self.add(
                ("machine_rank",), f"is {config.machine_rank}, but there are {machines} machine(s), counted from 0."
            )

    def length(self) -> None:
        """Schedules that end need an end."""
        if self.args.max_epochs is not None or self.args.max_steps is not None:
            return
        for index, optimizer in enumerate(self.config.optimizer_args):
            if optimizer.lr_scheduler != "constant":
                listed = self.config.origins.find(("optimizers",)) is not None
                path = ("optimizers", index, "lr_scheduler") if listed else ("train", "lr_scheduler")
                self.add(
                    path,
                    f"{optimizer.lr_scheduler!r} ends with the run, which has no end; set train.max_epochs "
                    f"or train.max_steps, or use constant.",
                )

    def optimizers(self) -> None:
        """One optimizer per trained role; the short form in `train:` only without the list."""
        roles = self.args.required_trainable_roles
        optimizers = self.config.optimizer_args
        names = [optimizer.name for optimizer in optimizers]
        for index, name in enumerate(names):
            if name not in roles:
                self.add(
                    ("optimizers", index, "name"),
                    f"{name!r} is no role of trainer {self.config.trainer_key!r}; its roles: {', '.join(roles)}.",
                )
            elif name in names[:index]:
                self.add(("optimizers", index, "name"), f"the role {name!r} has two optimizers; keep one.")
        missing = [role for role in roles if role not in names]
        if missing and self.given.get("train") is not None:
            self.add(
                ("optimizers",),
                f"trainer {self.config.trainer_key!r} trains the roles {', '.join(roles)}; add an entry for "
                f"{', '.join(missing)}.",
            )
        if self.config.origins.find(("optimizers",)) is None:
            return
        defaults = {name: _default(type(self.args), name) for name in OPTIMIZER_SHORT_FORM}
        for name, target in OPTIMIZER_SHORT_FORM.items():
            if name in self.given.get("train", set()) and getattr(self.args, name) != defaults[name]:
                self.add(
                    ("train", name),
                    f"has no effect beside `optimizers:`; write {target} into its entries, or remove `optimizers:`.",
                )

    def acceleration(self) -> None:
        """Lossy rollout caches change what coupled trainers replay."""
        if self.config.acceleration_args.rollout and self.args.paradigm == "coupled":
            self.add(
                ("acceleration", "rollout"),
                f"a lossy rollout cache makes the log-probs of trainer {self.config.trainer_key!r} wrong; remove it.",
            )

    def stored_examples(self) -> None:
        """A pass over stored examples shows each one; what deals prompts to cycles and groups has no part in it."""
        if self.args.execution_contract.generates:
            return
        why = f"deals prompts to rollouts, and trainer {self.config.trainer_key!r} makes none; remove it."
        if self.config.data_args.sampler_type != "auto":
            self.add(("data", "sampler_type"), why)
        unfit = no_stored_media(self.config.trainer_key, type(self.args), self.config.spec)
        if unfit is not None:
            self.add(("model", "model_type"), unfit)
        for index, dataset in enumerate(self.config.data_args.datasets or []):
            for name in ("unique_sample_num_per_epoch", "num_batches_per_epoch"):
                if dataset.train is not None and getattr(dataset.train, name) is not None:
                    self.add(("data", "datasets", index, "train", name), why)

    def unavailable(self) -> None:
        """Fields whose names are settled but that nothing acts on yet: an error, since ignoring them would mislead."""
        if self.config.model_args.attn_backend is not None:
            self._unavailable(("model", "attn_backend"))
        if self.config.acceleration_args.shared:
            self._unavailable(("acceleration", "shared"))
        if self.config.acceleration_args.rollout and self.args.paradigm != "coupled":
            self._unavailable(("acceleration", "rollout"))
        for name in ("process_index", "local_process_index"):
            if getattr(self.config, name) is not None:
                self.add((name,), "is set by the launcher for each process and cannot be given; remove it.")
        for index, optimizer in enumerate(self.config.optimizer_args):
            if optimizer.update_frequency != 1:
                self._unavailable(("optimizers", index, "update_frequency"))

    def _unavailable(self, path: Path) -> None:
        self.add(path, "is not available in this version and would have no effect; remove it.")


def _default(cls: type, name: str) -> Any:
    """The default of a field of an arguments class."""
    return next((f.default for f in dataclasses.fields(cls) if f.name == name), None)


def _plugin_keys(package: str) -> set[str]:
    """Keys registered in registries of an already imported package (a plugin that registers imports it)."""
    load_plugins()
    keys: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for value in vars(module).values():
                if isinstance(value, Registry):
                    keys.update(value.keys())
    return keys

"""Checks of the files and names that a configuration refers to, with nothing heavy imported."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flow_factory.advantage.registry import adv_estimator_path, list_adv_estimators
from flow_factory.data_utils.media_headers import MOST_OPENED, check_media_headers
from flow_factory.data_utils.offline_plan import plan_offline_data
from flow_factory.data_utils.prompt_files import (
    PromptRow,
    check_media_files,
    find_prompt_file,
    has_split,
    media_folders,
    read_prompts,
)
from flow_factory.errors import InputError
from flow_factory.hparams import (
    Arguments,
    ConfigError,
    DatasetArguments,
    DatasetEvalSpec,
    DatasetTrainSpec,
    Geometry,
    Problem,
    RewardArguments,
    check_world_size,
    plan_geometry,
)
from flow_factory.hparams.errors import Path as ConfigPath
from flow_factory.hparams.errors import nearest
from flow_factory.hparams.local_model import inspect_local_model
from flow_factory.objectives.registry import list_policy_losses, policy_loss_path
from flow_factory.registry import import_dotted
from flow_factory.rewards.build import check_reward_config
from flow_factory.rewards.registry import reward_keys
from flow_factory.tracking.backends import require_backend
from flow_factory.tracking.run_folder import CONFIG, check_run_name, holds_run


@dataclass
class StaticReport:
    """What the checks found out.

    Attributes:
        lines: Facts about the run, for people.
        warnings: What is allowed but doubtful.
        unseen: What could not be looked at, if anything.
    """

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unseen: str | None = None


def check_statically(config: Arguments) -> StaticReport:
    """Checks model folder, prompt files, media files, rewards and resume paths.

    Raises:
        ConfigError: With everything that is wrong.
    """
    checker = _StaticChecker(config)
    checker.model()
    geometry = plan_geometry(config)
    checker.training_data(geometry)
    checker.evaluation_data()
    checker.rewards()
    checker.functions()
    checker.paths()
    checker.processes()
    if checker.problems:
        raise ConfigError(checker.problems)
    if config.training_args.execution_contract.generates:
        checker.report.lines += geometry.describe().split("\n")
        checker.averages(geometry)
    checker.steps()
    return checker.report


class _StaticChecker:
    def __init__(self, config: Arguments) -> None:
        self.config = config
        self.report = StaticReport()
        self.problems: list[Problem] = []

    def _add(self, path: ConfigPath, message: str) -> None:
        self.problems.append(Problem(path, message, self.config.origins.place(path)))

    def model(self) -> None:
        """The checkpoint, as far as it is local."""
        found = inspect_local_model(self.config)
        self.problems += found.problems
        self.report.warnings += found.warnings
        arguments = self.config.model_args
        where = f" ({found.folder})" if found.folder is not None else " (from the Hub)"
        if found.folder is None:
            self.report.unseen = (
                f"the model, which is on the Hub: sizes and components of {arguments.model_name_or_path}"
            )
        self.report.lines.append(f"trainer: {self.config.trainer_key}, {arguments.finetune_type}")
        self.report.lines.append(f"model: {arguments.model_type}, {arguments.model_name_or_path}{where}")

    def training_data(self, geometry: Geometry) -> None:
        """Every training split can be read and is large enough for a cycle."""
        if not self.config.training_args.execution_contract.generates:
            self._stored_examples()
            return
        for index, source in enumerate(self.config.data_args.sources()):
            spec = source.train or DatasetTrainSpec()
            if not spec.enabled:
                continue
            path = self._dataset_path(index)
            rows = self._read(source, spec.split, path)
            if rows is None:
                continue
            distinct = len(dict.fromkeys((row.prompt, row.negative_prompt, row.media) for row in rows))
            usable = min(distinct, spec.max_dataset_size or distinct)
            per_cycle = geometry.per_source[source.name]
            if per_cycle > usable:
                self._add(
                    ("train", "unique_sample_num_per_epoch"),
                    f"draws {per_cycle} distinct prompts per cycle from dataset {source.name!r}, which has {usable}; "
                    f"lower it or add prompts.",
                )
            repeats = f" ({len(rows) - distinct} exact duplicates left out)" if len(rows) > distinct else ""
            self.report.lines.append(f"train prompts: {usable} from {source.dataset_dir} ({spec.split}){repeats}")

    def averages(self, geometry: Geometry) -> None:
        """The moving average, which evaluations and exports take, has left the starting weights when it is used."""
        train, frequency = self.config.training_args, self.config.eval_args.eval_freq
        if train.ema_decay == 0:
            return
        if train.max_epochs is not None:
            end, what = train.max_epochs, "in all"
        elif frequency:
            end, what = frequency, "before the first evaluation after the start"
        else:
            return
        steps = end * geometry.updates_per_cycle
        if steps < train.ema_update_interval:
            self.report.warnings.append(
                f"the run takes {steps} optimizer steps {what}, fewer than train.ema_update_interval "
                f"({train.ema_update_interval}): evaluations, `sample` and `export` take the moving average, which is "
                f"still the starting weights then. Set train.ema_update_interval to 1, or train.ema_decay to 0."
            )

    def _stored_examples(self) -> None:
        """Every record of stored examples, its files, and how they fill batches."""
        if getattr(self.config.training_args, "supervision", None) is None:
            return  # a trainer that reads data of its own
        try:
            self.report.lines += plan_offline_data(self.config).describe()
        except ConfigError as error:
            self.problems += error.problems
        except InputError as error:
            path = ("data", "datasets") if self.config.data_args.datasets is not None else ("data", "dataset_dir")
            self._add(path, str(error))

    def evaluation_data(self) -> None:
        """Every evaluation split can be read."""
        if not self.config.eval_args.eval_freq:
            return
        evaluated = 0
        for index, source in enumerate(self.config.data_args.sources()):
            spec = source.eval
            if spec is None:
                spec = DatasetEvalSpec()
                try:
                    if not has_split(source.dataset_dir, spec.split):
                        continue
                except InputError:
                    continue  # an unknown built-in name, already reported for training
            if not spec.enabled:
                continue
            evaluated += 1
            rows = self._read(source, spec.split, (*self._dataset_path(index)[:-1], "dataset_dir"))
            if rows is not None:
                count = min(len(rows), spec.max_dataset_size or len(rows))
                self.report.lines.append(f"eval prompts: {count} from {source.dataset_dir} ({spec.split})")
        if not evaluated:
            self.report.warnings.append(
                "no dataset has a test split, so nothing is evaluated (eval.eval_freq: 0 says so)."
            )

    def _dataset_path(self, index: int) -> ConfigPath:
        if self.config.data_args.datasets is None:
            return ("data", "dataset_dir")
        return ("data", "datasets", index, "dataset_dir")

    def _read(self, source: DatasetArguments, split: str, path: ConfigPath) -> list[PromptRow] | None:
        try:
            file = find_prompt_file(source.dataset_dir, split)
            rows = read_prompts(file, self.config.spec.io)
            folders = media_folders(source.dataset_dir, source.image_dir, source.video_dir, source.audio_dir)
            check_media_files(rows, folders, file)
            if unopened := check_media_headers(rows, folders, file):
                self.report.lines.append(
                    f"{file}: its first {MOST_OPENED} media files were opened, {unopened} were not"
                )
        except InputError as error:
            problem = Problem(path, str(error), self.config.origins.place(path))
            if str(problem) not in map(str, self.problems):
                self.problems.append(problem)
            return None
        return rows

    def rewards(self) -> None:
        """Every reward model exists and takes the params it is given."""
        for section, rewards in (("rewards", self.config.reward_args), ("eval_rewards", self.config.eval_reward_args)):
            for index, reward in enumerate(rewards.reward_configs if rewards is not None else []):
                self._reward((section, index), reward)
                self.report.lines.append(f"{section}: {reward.name} = {reward.reward_model}, weight {reward.weight}")

    def functions(self) -> None:
        """The advantage estimator and the policy loss: that they are functions, and take the parameters given.

        Those of the package are not imported where no parameter is given: they import torch, which takes seconds.
        """
        estimators, losses = list_adv_estimators(), list_policy_losses()
        for name, params, kind, keys, home in (
            ("advantage_aggregation", "advantage_params", "advantage estimator", estimators, adv_estimator_path),
            ("policy_loss", "policy_loss_params", "policy loss", losses, policy_loss_path),
        ):
            key = getattr(self.config.training_args, name, None)
            shipped = key in keys and home(key).startswith("flow_factory.")
            if key is None or (shipped and not getattr(self.config.training_args, params, {})):
                continue
            path: ConfigPath = ("train", name)
            if not self._named(path, key, keys, kind):
                continue
            from flow_factory.trainers.functions import build_estimator, build_policy_loss

            try:
                build_policy_loss(self.config) if name == "policy_loss" else build_estimator(self.config)
            except ConfigError as error:
                self.problems += error.problems
            except InputError as error:
                self._add(path, str(error))

    def _reward(self, path: ConfigPath, reward: RewardArguments) -> None:
        key = reward.reward_model or ""
        if not self._named((*path, "reward_model"), key, reward_keys(), "reward model"):
            return
        try:
            check_reward_config(reward)
        except ConfigError as error:  # in the reward's own params
            for problem in error.problems:
                where = (*path, *problem.path[1:])
                self.problems.append(Problem(where, problem.message, self.config.origins.nearest_place(where)))
        except InputError as error:
            self._add((*path, "reward_model"), str(error))

    def _named(self, path: ConfigPath, key: str, known: Iterable[str], kind: str) -> bool:
        known = list(known)
        if key.lower() in known:
            return True
        if "." in key:
            try:
                import_dotted(key, kind)
            except InputError as error:
                self._add(path, str(error))
                return False
            return True
        close = nearest(key, known, cutoff=0.4)
        hint = f" Did you mean {close!r}?" if close else ""
        self._add(path, f"there is no {kind} {key!r}.{hint} Known: {', '.join(known)}; or give a dotted path.")
        return False

    def paths(self) -> None:
        """The run's name and tracker, the folders it writes to, and paths to resume from."""
        log = self.config.log_args
        try:
            if log.run_name is not None:
                check_run_name(log.run_name)
        except InputError as error:
            self._add(("log", "run_name"), str(error))
        try:
            require_backend(log.logging_backend)
        except InputError as error:
            self._add(("log", "logging_backend"), str(error))
        self._copied_run()
        self._writable(("log", "save_dir"), log.save_dir)
        self._writable(("data", "cache_dir"), self.config.data_args.cache_dir)
        resume = self.config.training_args.resume
        if resume not in ("auto", "never") and not Path(resume).expanduser().exists():
            close = nearest(resume, ["auto", "never"])
            hint = f" Did you mean {close}?" if close else ""
            self._add(
                ("train", "resume"), f"the checkpoint {resume!r} does not exist; use auto, never or a path.{hint}"
            )
        weights = self.config.model_args.resume_path
        if weights is not None and not Path(weights).expanduser().exists():
            self._add(("model", "resume_path"), f"{weights!r} does not exist; give a local folder or file.")

    def _copied_run(self) -> None:
        """The config.yaml of a run folder that was copied or moved still names the old place, and would go on there."""
        log, origins = self.config.log_args, self.config.origins
        file = Path(origins.default_place)
        given = {"log.save_dir", "log.run_name"} & set(origins.overridden())
        if log.run_name is None or given or file.name != CONFIG or not holds_run(file.parent):
            return
        named = Path(log.save_dir).expanduser() / log.run_name
        here = file.resolve().parent
        if named.resolve() != here:
            self._add(
                ("log", "run_name"),
                f"{file} lies in the folder of a run, but would go on with the run in {named}. To go on with this one: "
                f"log.save_dir={here.parent} log.run_name={here.name}; to start another with its settings, give "
                f"log.run_name a new name.",
            )

    def _writable(self, path: ConfigPath, given: str) -> None:
        """A folder that the run creates, or writes into if it is there; nothing is created here."""
        folder = Path(given).expanduser().absolute()
        while not os.path.lexists(folder) and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            self._add(path, f"{given!r} cannot be a folder, since {folder} is not one; give another path.")
        elif not os.access(folder, os.W_OK | os.X_OK):
            self._add(path, f"nothing can be written in {folder}; give another path, or make it writable.")

    def processes(self) -> None:
        """Under a launcher, the number of processes is the configured one."""
        launched = os.environ.get("WORLD_SIZE", "")
        under_launcher = "RANK" in os.environ or "LOCAL_RANK" in os.environ
        if under_launcher and launched.isdigit():
            try:
                check_world_size(self.config, int(launched))
            except InputError as error:
                self._add(("num_processes",), str(error))

    def steps(self) -> None:
        """Which steps are stochastic, as far as it is known without the model's grid."""
        scheduler, training = self.config.scheduler_args, self.config.training_args
        if training.paradigm != "coupled":
            return
        if scheduler.sde_steps is not None:
            candidates = f"indices {scheduler.sde_steps}"
        else:
            candidates = "those that the model's grid allows, resolved when it is loaded"
        count = "all" if scheduler.num_sde_steps is None else str(scheduler.num_sde_steps)
        length = self.config.spec.rollout_steps(training.num_inference_steps, self.config.train_generation)
        self.report.lines.append(
            f"steps: {length} ({scheduler.dynamics_type}, noise {scheduler.noise_level:g}); "
            f"{count} stochastic per cycle ({scheduler.sde_window}) of {candidates}"
        )

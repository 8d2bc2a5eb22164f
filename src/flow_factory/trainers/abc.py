"""BaseTrainer: the one training loop, what it is built from, and the hooks that algorithms fill in."""

from __future__ import annotations

import logging
import time
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from flow_factory.checkpoints.signals import SignalGuard
from flow_factory.contracts import ExecutionContract
from flow_factory.errors import RunError
from flow_factory.hparams import Arguments
from flow_factory.rewards.buffer import RewardBuffer
from flow_factory.samples import BaseSample, Purpose, derive_seed
from flow_factory.tracking.run_folder import resolve_resume
from flow_factory.trainers import setup
from flow_factory.trainers.drivers import CycleDropped, TrainingProgress, get_driver_class
from flow_factory.trainers.evaluation import Evaluator
from flow_factory.trainers.monitoring import SampleWatch
from flow_factory.trainers.registry import check_contract
from flow_factory.trainers.result import TrainingResult
from flow_factory.trainers.roles import RoleOptimizationCoordinator
from flow_factory.trainers.rollouts import RolloutPlan
from flow_factory.trainers.state import load_run_state, run_state
from flow_factory.trainers.stopping import DeadlinePassedError, Stopping
from flow_factory.trainers.verbs import TrainerVerbs

logger = logging.getLogger(__name__)


class BaseTrainer(TrainerVerbs, ABC):
    """Owns the acquisition loop; subclasses supply `sample` / `optimize`, or `optimize_batch`.

    Args:
        config: The resolved configuration. Everything that can be checked is checked before the model is loaded.

    Attributes:
        paradigm: "coupled" (needs SDE transition densities), "decoupled" or "distillation".
        execution_contract: One of the constants of `flow_factory.contracts`, equal to the arguments class's.
        progress: The frozen counters; a cycle that raises does not advance them.
    """

    paradigm: ClassVar[str]
    execution_contract: ClassVar[ExecutionContract]

    def __init__(self, config: Arguments) -> None:
        self.config = config
        self.training_args = config.training_args
        contract = check_contract(type(self), type(self.training_args))
        driver_class = get_driver_class(contract)
        driver_class.check_hooks(type(self))
        self.driver = driver_class()
        self.progress = TrainingProgress()

        self.accelerator = setup.build_accelerator(config)
        self.comm = setup.build_comm(self.accelerator)
        self.geometry = setup.plan_run_geometry(config, self.comm)
        setup.preflight(config, contract)
        self.tracker, self.run_dir = setup.open_run(config, self.comm, self.accelerator)
        try:
            self._build(config, contract)
        except BaseException:
            self.tracker.close()  # lets go of the run folder
            raise

    def _build(self, config: Arguments, contract: ExecutionContract) -> None:
        """Everything that needs the run folder."""
        self.tracker.display.line(f"loading {config.model_args.model_name_or_path}")
        self.adapter, self.ema = setup.build_adapter(
            config, self.comm, self._declare_model_variants(), self.needs_reference()
        )
        self.sde_steps = setup.resolve_steps(config, self.adapter)
        self.geometry = setup.replan(config, self.geometry, self.sde_steps)
        for line in setup.describe_run(config, self.adapter, self.geometry, self.sde_steps, self.comm, self.run_dir):
            self.tracker.display.line(line)
        self.dataloader, self.source_loaders = self._build_train_dataloader()
        self.roles: RoleOptimizationCoordinator = setup.build_roles(
            config, self.adapter, self.geometry, self.comm, self.dataloader
        )
        self.optimizer = next(iter(self.roles.primary.optimizers.values()))
        self.reward_buffer: RewardBuffer | None = None
        self.advantage_processor = None
        if contract.needs_rewards:
            self.reward_buffer = setup.build_reward_buffer(config, self.geometry, self.comm, self.run_dir)
            self.advantage_processor = setup.build_advantage_processor(config, self.comm)
        rewards = None if self.reward_buffer is None else self.reward_buffer.processor
        self.evaluator = Evaluator.build(config, self.adapter, self.comm, self.run_dir, self.tracker, rewards)
        self.checkpointer = setup.build_checkpointer(config, self.run_dir, self.comm)
        self.watch = SampleWatch(config, self.comm)

        self.result = TrainingResult(self.run_dir)
        self.stopping = Stopping(self.comm, self.training_args.signal_deadline_s)
        self.signals: SignalGuard | None = None
        self._cycle_losses: list[float] = []
        self._cycle_metrics: dict[str, float] = {}
        self._cycle_rewards: dict[str, float] | None = None
        self._plan: RolloutPlan | None = None
        self._cycle_start = self.progress
        self._evaluated_epoch = -1
        self._saved: tuple[TrainingProgress, int] | None = None

    # ------------------------------------------------------------------------------------------------ views
    @property
    def epoch(self) -> int:
        """Finished cycles: what `max_epochs` counts."""
        return self.driver.cycle(self.progress)

    # ------------------------------------------------------------------------------------------------ the loop
    def start(self) -> TrainingResult:
        """Runs to the end of the configured training, or to a signal.

        Returns:
            The run's histories, counts, timings and newest checkpoint.

        Raises:
            Interrupted: A signal ended the run; its state was saved and resuming equals the uninterrupted run.
            RunError: The run failed, and the newest checkpoint is untouched; or `log.monitor_stop` ended it, saved.
        """
        started = time.perf_counter()
        # A terminal's Ctrl-C may reach a worker twice: from the terminal, and from the launcher that passes it on.
        with SignalGuard(grace_s=0.5 if self.comm.world_size > 1 else 0.0) as self.signals:
            try:
                self._resume()
                if not self.should_continue_training():
                    lengths = ((key, getattr(self.training_args, key)) for key in ("max_epochs", "max_steps"))
                    given = " and ".join(f"train.{key} ({value})" for key, value in lengths if value is not None)
                    self.tracker.display.line(
                        f"this run is finished already: raise {given} to go on, or give a new log.run_name."
                    )
                self._boundary()
                while self.should_continue_training():
                    self._run_cycle()
                    self._boundary()
                self.result.timings["total"] = time.perf_counter() - started
                self.tracker.finish(self.result)
            except BaseException as error:
                self.result.timings["total"] = time.perf_counter() - started
                self.tracker.stop(self.result, error)
                raise
            finally:
                self._close()
                self.result.timings["total"] = time.perf_counter() - started
        return self.result

    def _close(self) -> None:
        """Ends threads and workers, closes files and lets go of the run folder; all of it, whatever fails."""
        with ExitStack() as stack:
            stack.callback(self.tracker.close)
            close_loader = getattr(self.dataloader, "close", None)
            if close_loader is not None:
                stack.callback(close_loader)  # a prompt loader's workers end with the run
            stack.callback(self.evaluator.close)
            if self.reward_buffer is not None:
                # A call that hangs is not waited for once a signal has asked to stop.
                stopped = self.signals is not None and self.signals.requested
                stack.callback(self.reward_buffer.close, wait=not stopped)

    def _run_cycle(self) -> None:
        """One driver cycle with its bookkeeping; a signal that arrives early drops it and saves its start."""
        self._cycle_rewards, self._plan = None, None
        if not self.driver.inside_cycle:
            self._cycle_losses, self._cycle_metrics = [], {}
        timings_before = dict(self.result.timings)
        bundle = self.adapter.bundle
        rows_before = (bundle.rows, bundle.trained_rows)
        samples_before = self.result.counts.get("samples", 0)
        began = self._cycle_start = self.progress
        try:
            completed = self.driver.run_cycle(self)
        except CycleDropped:
            if self.reward_buffer is not None:
                self.reward_buffer.discard()
            self._leave("the unfinished cycle was dropped")
        except DeadlinePassedError:
            self.progress = began
            raise self.stopping.lost(self.signals, self.result.checkpoint) from None
        except BaseException:
            self.progress = began  # a cycle that raises does not advance it, whatever it had done by then
            raise
        if not completed:
            if self.interrupt_requested():
                self._leave(f"the epoch was left before batch {getattr(self.driver, 'next_batch', 0)}")
            return
        if self.progress.optimizer_step == began.optimizer_step:
            raise RunError(f"cycle {self.epoch} of {type(self).__name__} made no optimizer step.")
        if self._cycle_rewards is not None:
            self.result.rewards.append(self._cycle_rewards)
        self._after_acquisition_cycle()
        seconds = {k: self.result.timings[k] - timings_before.get(k, 0.0) for k in self.result.timings}
        self._cycle_metrics["loss"] = sum(self._cycle_losses) / len(self._cycle_losses)
        for name, now, before in zip(
            ("network_rows", "trained_rows"), (bundle.rows, bundle.trained_rows), rows_before, strict=True
        ):
            rows = (now - before) * self.comm.world_size  # ranks work in step
            if self.execution_contract.generates:  # an epoch that was left in its middle would show a part
                self._cycle_metrics[name] = float(rows)
            self.result.counts[name] = self.result.counts.get(name, 0) + rows
        if self.execution_contract.generates:
            self._cycle_metrics["samples"] = float(self.result.counts.get("samples", 0) - samples_before)
        self.tracker.log_cycle(self.epoch, self.step, self._cycle_metrics, seconds)
        self.result.counts["cycles"] = self.result.counts.get("cycles", 0) + 1
        self.watch.judge(self.tracker, self.step)

    def _run_training_step(self) -> None:
        """One generation cycle: sample, score, optimize. Override to group the phases differently."""
        with self.phase("rollout"):
            samples = self.sample()
        self.check_interrupt()
        if self.execution_contract.needs_rewards:
            with self.phase("feedback"):
                self.prepare_feedback(samples)
        self._cycle_metrics.update(self.watch.measure(samples, self.reward_buffer))
        self.check_interrupt()
        with self.phase("optimize"):
            self.adapter.train()
            self.optimize(samples)
        if not self.at_update_boundary:
            raise RunError(
                f"{type(self).__name__}.optimize() ended inside an accumulation window of {self.accumulation_steps} "
                f"terms; its loss terms per cycle do not match loss_terms_per_batch() of its arguments."
            )

    def _after_acquisition_cycle(self) -> None:
        """Called after each completed cycle: snapshots and schedules of the algorithm move here."""

    def should_continue_training(self) -> bool:
        """Compares with `train.max_epochs` and `train.max_steps` (None: no limit)."""
        arguments = self.training_args
        within_epochs = arguments.max_epochs is None or self.epoch < arguments.max_epochs
        return within_epochs and (arguments.max_steps is None or self.step < arguments.max_steps)

    # ------------------------------------------------------------------------------------------------ hooks
    def sample(self) -> list[BaseSample]:
        """Generates this cycle's samples (generation contracts)."""
        raise NotImplementedError(f"{type(self).__name__} defines no sample().")

    def optimize(self, samples: list[BaseSample]) -> None:
        """Optimises on this cycle's samples (generation contracts)."""
        raise NotImplementedError(f"{type(self).__name__} defines no optimize().")

    def optimize_batch(self, batch: Any) -> None:
        """Optimises on one batch of stored examples (dataset contract)."""
        raise NotImplementedError(f"{type(self).__name__} defines no optimize_batch().")

    def prepare_feedback(self, samples: list[BaseSample]) -> None:
        """Finishes scoring, computes the advantages and logs both."""
        assert self.reward_buffer is not None and self.advantage_processor is not None
        rewards: dict[str, Any] = {}
        # A reward that fails on one rank ends all of them; one that hangs is left by the first signal.
        with self.comm.together(), self.stopping.abandonable(self.signals):
            rewards = self.reward_buffer.finalize(store_to_samples=True, split="all")
        self.check_interrupt()
        self.compute_advantages(samples, rewards)
        metrics = self.advantage_processor.pop_advantage_metrics()
        if metrics.get("reward/failed_ratio") == 1.0:
            raise RunError(
                f"scoring failed for every sample of cycle {self.epoch} (rewards {', '.join(rewards)}): there is "
                f"nothing to learn from. See the warnings above; is the judge that the reward asks reachable?"
            )
        self._cycle_metrics.update(metrics)
        means = {k: v for k, v in metrics.items() if k.startswith("reward/") and k.endswith("/mean")}
        self._cycle_rewards = {k[len("reward/") : -len("/mean")]: v for k, v in means.items()}

    def needs_reference(self) -> bool:
        """Whether the algorithm compares with a reference policy (by default: if it has a KL term)."""
        return float(getattr(self.training_args, "kl_beta", 0.0)) > 0

    def algorithm_state(self) -> dict[str, Any]:
        """What the algorithm must remember beyond weights, optimizers, snapshots and counters."""
        return {}

    def load_algorithm_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `algorithm_state`."""

    def _declare_model_variants(self) -> Sequence[str] | Mapping[str, str]:
        """Names of frozen snapshots the algorithm needs besides the reference and the EMA; or name to device."""
        return ()

    def _build_train_dataloader(self) -> tuple[Any, dict[str, Any]]:
        """The training loader and the per-source loaders behind it; dataset trainers build their own."""
        return setup.build_prompt_loader(self.config, self.adapter, self.comm, self.geometry)

    def seed_cycle(self, cycle: int, part: int = 0) -> None:
        """Seeds the global generators, for code outside the toolkit (rewards) and dropout; the rest has its own.

        Args:
            cycle: Number of the cycle.
            part: Where inside it a run may be stopped and gone on with.
        """
        seed = derive_seed(self.training_args.seed, Purpose.GLOBAL, cycle=cycle, member=part, step=self.comm.rank)
        setup.seed_everything(seed)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase and names it in the progress display."""
        start = time.perf_counter()
        self.tracker.enter_phase(name, self.epoch, self.training_args.max_epochs)
        yield
        self.result.timings[name] = self.result.timings.get(name, 0.0) + time.perf_counter() - start

    # ------------------------------------------------------------------------------------------------ boundaries
    def evaluate(self) -> dict[str, float]:
        """Generates and scores the evaluation sets with the EMA weights (if any), fixed seeds, and saves grids.

        Raises:
            CycleDropped: If a signal arrived meanwhile; nothing has been logged then.
        """
        with self.phase("evaluate"):
            means = self.evaluator.run(
                self.epoch, self.step, lambda: self.signals is not None and self.signals.requested
            )
        self._evaluated_epoch = self.epoch
        self.result.evaluations.append({"cycle": float(self.epoch), **means})
        return means

    def save_checkpoint(self) -> None:
        """Writes the whole training state atomically, or with `log.save_model_only` the weights; all ranks call it."""
        self._saved = (self.progress, self._evaluated_epoch)
        with self.phase("checkpoint"):
            self.result.checkpoint = self.checkpointer.save(
                self.driver.checkpoint_number(self.progress),
                {} if self.config.log_args.save_model_only else run_state(self),
                {"progress": self.progress.to_mapping(), "config": self.config.to_mapping()},
                export=self._export,
            )

    def _export(self, folder: Path) -> None:
        """Weights for other programs, beside the state: the LoRA in diffusers' layout, or the trained components.

        The averaged weights go beside the live ones: they are what the evaluations show.
        """
        average = None if self.ema is None else self.ema.snapshot.name
        if self.config.model_args.finetune_type == "lora":
            self.adapter.export_lora(folder / "lora")
            if average is not None:
                self.adapter.export_lora(folder / "lora_ema", variant=average)
            return
        self.adapter.save_full(folder / "full")
        if average is not None:
            with self.adapter.snapshot(average):
                self.adapter.save_full(folder / "full_ema")

    def load_checkpoint(self, path: Any) -> None:
        """Restores everything `save_checkpoint` wrote; nothing is restored by halves."""
        parts, _ = self.checkpointer.load(path, require=("weights", "optimizer", "trainer"))
        load_run_state(self, parts)
        self.result.checkpoint = path

    def _resume(self) -> None:
        found: Path | None = None
        with self.comm.together():
            if self.comm.is_main:  # ranks that looked for themselves could find different checkpoints
                found = resolve_resume(self.config, self.run_dir)
        name = self.comm.broadcast_object(None if found is None else str(found))
        if name is not None:
            path = Path(name)
            self.load_checkpoint(path)
            self.tracker.resume(self.epoch, self.step, path, evaluated_cycle=self._evaluated_epoch)

    def _boundary(self) -> None:
        """What happens between cycles: a pending signal, then evaluation and the checkpoint.

        Each is done once per cycle number, also when the run is stopped and resumed in between.
        """
        done = not self.should_continue_training()
        if not done and self.interrupt_requested():
            self._leave("nothing was lost")  # an evaluation that is due is done when the run goes on
        if self._evaluation_due(done):
            try:
                self.evaluate()
            except CycleDropped:
                self._leave("the unfinished evaluation was dropped")
        save_freq = self.config.log_args.save_freq
        stop = self.watch.should_stop and not done
        due = done or stop or (save_freq > 0 and self.epoch > 0 and self.epoch % save_freq == 0)
        if due and self._saved != (self.progress, self._evaluated_epoch):
            self.save_checkpoint()
        if stop:
            raise self.watch.stopped(self.epoch, self.result.checkpoint)

    def _evaluation_due(self, done: bool) -> bool:
        every = self.config.eval_args.eval_freq
        wanted = self.epoch == 0 or done or (every and self.epoch % every == 0)
        return bool(every and wanted and self.evaluator.enabled and self._evaluated_epoch != self.epoch)

    def interrupt_requested(self) -> bool:
        """True on every rank once any rank has received SIGINT or SIGTERM. A collective: all ranks call it."""
        return self.stopping.requested(self.signals)

    def check_interrupt(self) -> None:
        """Drops the cycle if a signal has arrived; does nothing once the cycle has changed weights."""
        untouched = self.at_update_boundary and self.progress == self._cycle_start
        if untouched and self.interrupt_requested():
            raise CycleDropped

    def _leave(self, what: str) -> NoReturn:
        self.save_checkpoint()
        raise self.stopping.saved(self.signals, what, self.epoch, self.result.checkpoint)

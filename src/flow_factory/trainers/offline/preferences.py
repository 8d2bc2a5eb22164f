"""Preferences from a model and rewards: several pictures per prompt, of which the best and the worst become a pair.

The work is kept beside the target (`.<name>.partial`) and goes on where it was stopped: every draw depends on (seed,
prompt, member) alone, and the pictures of a prompt are made in the same batches, so the result is the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from flow_factory.checkpoints.atomic import atomic_write_json, fsync_tree, publish_folder
from flow_factory.data_utils.conditions import ConditionSource, build_conditions, needs_negative
from flow_factory.data_utils.offline_writer import OfflineWriter, check_free, example_line
from flow_factory.data_utils.prompt_dataset import PromptRecord
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.hparams import Arguments
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.samples import BaseSample, ImageSample, NoiseKey
from flow_factory.trainers import setup
from flow_factory.trainers.inference import InferenceModel
from flow_factory.trainers.rollouts import RolloutPlan, rollout_batch

_PLAN, _PROGRESS = "plan.json", "progress.jsonl"
Outcome = Literal["pair", "tie", "failed"]


@dataclass(frozen=True)
class PreferenceSettings:
    """What decides which pairs are made.

    Attributes:
        images_per_prompt: K, pictures that are compared; at least 2.
        seed: Seed of their noise.
        min_margin: The best total must exceed the worst by more than this, else the prompt is a tie.
        split: Name of the split that is written.
    """

    images_per_prompt: int
    seed: int
    min_margin: float = 0.0
    split: str = "train"


@dataclass
class PreferenceCounts:
    """What became of the prompts.

    Attributes:
        pairs: Prompts with a pair.
        ties: Prompts whose totals lie too close.
        failed: Prompts of whose pictures fewer than two could be scored.
    """

    pairs: int = 0
    ties: int = 0
    failed: int = 0

    @property
    def prompts(self) -> int:
        """All of them."""
        return self.pairs + self.ties + self.failed


def make_preferences(
    model: InferenceModel,
    config: Arguments,
    records: Sequence[PromptRecord],
    rewards: RewardProcessor,
    settings: PreferenceSettings,
    target: Path,
    *,
    identity: dict[str, Any],
    advance: Callable[[int], None] = lambda count: None,
) -> PreferenceCounts:
    """Makes the dataset `target` of preferences, or goes on with one that was begun.

    Args:
        model: The model, with the weights that are to make the pictures active.
        config: `eval:` says how pictures are made and how many at once.
        records: The prompts.
        rewards: Scores the pictures; their weighted sum decides.
        settings: See `PreferenceSettings`.
        target: The folder to create.
        identity: What else the result depends on (weights, configuration), to refuse to go on with other work.
        advance: Called with the number of pictures that are done.

    Raises:
        InputError: If `target` exists, work of other settings was begun there, or no prompt gave a pair.
    """
    check_free(target)
    size = config.eval_args.per_device_batch_size
    prompts_at_once = max(1, size // settings.images_per_prompt)
    plan = {
        "settings": asdict(settings),
        "rows": size,
        # The group tells the contents of condition media; rewards may read the metadata.
        "prompts": [[r.source, r.prompt, r.negative_prompt, r.group_id, dict(r.metadata)] for r in records],
        **identity,
    }
    work = _open_work(target, json.loads(json.dumps(plan)))
    counts = PreferenceCounts()
    done = _finished(work, prompts_at_once, counts)
    advance(done * settings.images_per_prompt)
    maker = _Maker(model, config, records, rewards, settings)
    with OfflineWriter(work, settings.split) as writer, (work / _PROGRESS).open("a", encoding="utf-8") as progress:
        for start in range(done, len(records), prompts_at_once):
            lines = []
            for record, samples in maker.groups(records[start : start + prompts_at_once], advance):
                outcome, line = _judge(record, samples, rewards, settings, writer)
                _count(counts, outcome)
                lines.append(json.dumps({"outcome": outcome, "record": line}, ensure_ascii=False))
            progress.write("\n".join(lines) + "\n")
            progress.flush()
            os.fsync(progress.fileno())
    if not counts.pairs:
        shutil.rmtree(work)  # finished, and nothing to go on with
        raise InputError(
            f"none of {counts.prompts} prompts gave a pair ({counts.ties} ties, {counts.failed} with fewer than two "
            f"scored pictures): the rewards do not tell the pictures apart. Use a graded reward, or compare more "
            f"pictures per prompt."
        )
    _publish(work, target, settings.split)
    return counts


class _Maker:
    """Makes and scores the pictures of prompts."""

    def __init__(
        self,
        model: InferenceModel,
        config: Arguments,
        records: Sequence[PromptRecord],
        rewards: RewardProcessor,
        settings: PreferenceSettings,
    ) -> None:
        self.adapter, self.config = model.adapter, config
        self.rewards, self.settings = rewards, settings
        names = dict.fromkeys(record.source for record in records)
        self.plans: dict[str, RolloutPlan] = {name: setup.build_eval_plan(config, self.adapter, name) for name in names}
        scales = [plan.guidance.scale for plan in self.plans.values()]
        self.conditions: ConditionSource = build_conditions(
            config,
            self.adapter,
            self.adapter.comm,
            [records],
            needs_negative(self.adapter, *scales),
            config.eval_generation,
            lambda record: (self.plans[record.source].height, self.plans[record.source].width),
        )

    def groups(
        self, records: Sequence[PromptRecord], advance: Callable[[int], None]
    ) -> Iterator[tuple[PromptRecord, list[BaseSample]]]:
        """Each prompt with its K scored samples."""
        members = self.settings.images_per_prompt
        samples: list[BaseSample] = []
        for source in dict.fromkeys(record.source for record in records):  # a batch has one source
            rows = [(r, m) for r in records if r.source == source for m in range(members)]
            size = self.config.eval_args.per_device_batch_size
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                batch = self.conditions.batch([r for r, _ in part], [m for _, m in part])
                keys = [NoiseKey(self.settings.seed, 0, r.group_id, m) for r, m in part]
                with torch.no_grad():
                    samples += rollout_batch(
                        self.adapter,
                        batch,
                        self.plans[source],
                        keys,
                        compute_log_prob=False,
                        trajectory_indices=(),
                        solver=self.config.eval_args.solver,
                    )
                advance(len(part))
        self.rewards.score(samples)
        for record in records:
            yield record, [s for s in samples if s.group_id == record.group_id]


def _judge(
    record: PromptRecord,
    samples: Sequence[BaseSample],
    rewards: RewardProcessor,
    settings: PreferenceSettings,
    writer: OfflineWriter,
) -> tuple[Outcome, str | None]:
    """Saves the best and the worst picture, with what they were made from, and returns their record, if they differ."""
    totals = [(total, s) for s in samples if (total := _total(s, rewards)) is not None]
    if len(totals) < 2:
        return "failed", None
    # Of equals the one that was made first.
    best = max(totals, key=lambda pair: (pair[0], -pair[1].member))
    worst = min(totals, key=lambda pair: (pair[0], pair[1].member))
    if not best[0] - worst[0] > settings.min_margin:
        return "tie", None
    chosen, rejected = best[1], worst[1]
    name = f"{record.index:06d}-{record.group_id & 0xFFFFFFFF:08x}"
    # On the disk before the record that names them: work that is gone on with is not looked through again.
    arms = {
        "chosen": writer.save_image(cast(ImageSample, chosen).pil, f"{name}-chosen", durable=True),
        "rejected": writer.save_image(cast(ImageSample, rejected).pil, f"{name}-rejected", durable=True),
    }
    inputs = [writer.save_input(file) for file in record.media]
    metadata = {
        **record.metadata,
        "rewards": {key: [chosen.rewards[key], rejected.rewards[key]] for key in chosen.rewards},
        "totals": [best[0], worst[0]],
        "members": [chosen.member, rejected.member],
    }
    negative = record.negative_prompt
    line = example_line("preference", record.prompt, arms, inputs=inputs, negative_prompt=negative, metadata=metadata)
    return "pair", line


def _total(sample: BaseSample, rewards: RewardProcessor) -> float | None:
    """The weighted sum of the rewards that apply; None if one of them failed or none applies."""
    weights = rewards.weights_for(sample)
    scores = {name: sample.rewards.get(name) for name, weight in weights.items() if weight}
    if not scores or any(score is None for score in scores.values()):
        return None
    return sum(weights[name] * cast(float, score) for name, score in scores.items())


def _open_work(target: Path, plan: dict[str, Any]) -> Path:
    work = target.with_name(f".{target.name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    note = work / _PLAN
    if not note.exists():
        atomic_write_json(note, plan)
    elif json.loads(note.read_text(encoding="utf-8")) != plan:
        raise InputError(
            f"{work} holds unfinished work of other settings, weights or prompts; give them again to go on with it, "
            f"remove it, or choose another --output."
        )
    return work


def _finished(work: Path, prompts_at_once: int, counts: PreferenceCounts) -> int:
    """How many prompts are done. What a killed process wrote by halves is cut off."""
    path = work / _PROGRESS
    data = path.read_bytes() if path.exists() else b""
    lines = data.split(b"\n")[:-1]  # the last line has no end, or is empty
    lines = lines[: len(lines) // prompts_at_once * prompts_at_once]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    for line in lines:
        _count(counts, json.loads(line)["outcome"])
    return len(lines)


def _count(counts: PreferenceCounts, outcome: Outcome) -> None:
    counts.pairs += outcome == "pair"
    counts.ties += outcome == "tie"
    counts.failed += outcome == "failed"


def _publish(work: Path, target: Path, split: str) -> None:
    """Writes the records of all pairs and gives the folder its name; then what only the work needed goes."""
    lines = (work / _PROGRESS).read_text(encoding="utf-8").split("\n")[:-1]
    found = [json.loads(line)["record"] for line in lines]
    text = "".join(record + "\n" for record in found if record is not None)
    (work / f"{split}.jsonl").write_text(text, encoding="utf-8")
    fsync_tree(work)
    publish_folder(work, target)
    for name in (_PROGRESS, _PLAN):
        (target / name).unlink()


def preference_rewards(
    config: Arguments, comm: Comm, sources: Sequence[str], images_per_prompt: int
) -> RewardProcessor:
    """The rewards that compare the pictures of a prompt: `rewards:`, or `eval_rewards:` where there are none.

    Raises:
        InputError: If the configuration has neither.
    """
    section = config.reward_args if config.reward_args.reward_configs else config.eval_reward_args
    if section is None or not section.reward_configs:
        raise InputError(
            "the configuration has neither rewards nor eval_rewards, and nothing else tells which picture is better; "
            "add for instance rewards: {reward_model: prompt_match}."
        )
    return RewardProcessor(section, comm, str(comm.device), sources=sources, group_size=images_per_prompt)

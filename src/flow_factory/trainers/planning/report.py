"""What a plan says, as values; `to_mapping` is what `flow-factory plan --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flow_factory.models.shapes.blocks import BlockTrace
from flow_factory.trainers.planning.evaluations import NOTHING, Range

Place = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class ComponentPlan:
    """A network of the pipeline.

    Attributes:
        name: Its component name.
        kind: Its class.
        parameters: How many it has, LoRA layers left out.
        trainable: How many are trained: its LoRA's, or all.
        dtype: In which most of its weights are held.
        bytes: Of its weights and buffers, LoRA left out.
    """

    name: str
    kind: str
    parameters: int
    trainable: int
    dtype: str
    bytes: int


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory of one process.

    Attributes:
        name: What it is.
        bytes: Its size; None where it is not known, which `note` explains.
        place: Where it lies.
        always: Held all the time; otherwise only while something is done, and one of these at a time.
        estimate: An estimate, and not a sum of sizes that are known exactly.
        note: What it is made of.
    """

    name: str
    bytes: int | None
    place: Place = "device"
    always: bool = True
    estimate: bool = False
    note: str = ""


def unknown_part(name: str, problem: str) -> MemoryPart:
    """A passing part whose size cannot be told, and why."""
    return MemoryPart(name, None, always=False, estimate=True, note=f"not known: {problem}")


def counted(number: int, what: str) -> str:
    """A number with a noun, such as "1 picture" or "1,200 rows"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def counted_media(number: int, size: tuple[int, int], frames: int | None) -> str:
    """So many pictures, or videos of so many frames, of a height and a width."""
    shape = f"{size[0]} x {size[1]}"
    if frames is None:
        return f"{counted(number, 'picture')} of {shape}"
    return f"{counted(number, 'video')} of {counted(frames, 'frame')} of {shape}"


@dataclass(frozen=True)
class Activations:
    """What a differentiated prediction of a micro-batch holds for its backward pass: an estimate.

    Attributes:
        rows: Rows of the prediction; with classifier-free guidance twice the samples.
        plain: Bytes without gradient checkpointing, or None if the network's shapes depend on numbers.
        checkpointed: With it; None also where the network has none.
        blocks: What the blocks hold, without checkpointing.
        problem: Why it is not known.
    """

    rows: int
    plain: int | None = None
    checkpointed: int | None = None
    blocks: tuple[BlockTrace, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class CycleRows:
    """Rows that go through the trained network in one cycle, over all processes.

    Attributes:
        rollout: Of the rollout.
        frozen: Of the optimisation, without gradients; None where the trainer's use of the network is not known.
        trained: With gradients; likewise.
    """

    rollout: int
    frozen: Range | None = NOTHING
    trained: Range | None = NOTHING

    @property
    def network_rows(self) -> Range | None:
        """All of them: `network_rows` of `metrics.jsonl`."""
        if self.frozen is None or self.trained is None:
            return None
        return Range.exactly(self.rollout) + self.frozen + self.trained


@dataclass(frozen=True)
class EvaluationRows:
    """One evaluation of one dataset.

    Attributes:
        dataset: Its name.
        prompts: How many prompts it has.
        rows: Rows through the network, over all processes.
    """

    dataset: str
    prompts: int
    rows: int


@dataclass(frozen=True)
class RunPlan:
    """What a run will need.

    Attributes:
        trainer: `train.trainer_type`.
        model: `model.model_type`, and `path`, `model.model_name_or_path`.
        device: Kind of device that was planned for.
        precision: Dtype of matrix products.
        processes: W, each with a device of its own.
        finetune: "lora" or "full".
        components: The pipeline's networks.
        memory: Of one process.
        activations: Of a differentiated prediction.
        unit: What `cycles` counts: "cycle", or "epoch" of stored examples.
        cycles: The run's cycles from the first on, at most a thousand.
        total_cycles: How many the run has; None: until stopped.
        evaluations: One evaluation of each dataset.
        evaluation_count: How often the run evaluates; None: until stopped.
        notes: What the reader should know of these numbers.
    """

    trainer: str
    model: str
    path: str
    device: str
    precision: str
    processes: int
    finetune: str
    components: tuple[ComponentPlan, ...]
    memory: tuple[MemoryPart, ...]
    activations: Activations
    unit: str
    cycles: tuple[CycleRows, ...]
    total_cycles: int | None
    evaluations: tuple[EvaluationRows, ...]
    evaluation_count: int | None
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def parameters(self) -> int:
        """Of all networks, LoRA left out."""
        return sum(component.parameters for component in self.components)

    @property
    def trainable(self) -> int:
        """Trained parameters of all networks."""
        return sum(component.trainable for component in self.components)

    def part(self, name: str) -> MemoryPart:
        """The memory part of that name.

        Raises:
            KeyError: If there is none.
        """
        for part in self.memory:
            if part.name == name:
                return part
        raise KeyError(f"no part {name!r}; there are {[part.name for part in self.memory]}.")

    @property
    def held_bytes(self) -> int:
        """Device memory that a process holds all the time."""
        return sum(part.bytes or 0 for part in self.memory if part.place == "device" and part.always)

    @property
    def peak_bytes(self) -> int | None:
        """The most device memory that a process needs at a time; None if a part is not known."""
        passing = [part.bytes for part in self.memory if part.place == "device" and not part.always]
        if None in passing:
            return None
        return self.held_bytes + max((size for size in passing if size is not None), default=0)

    def spread(self, of: Literal["rollout", "network_rows", "trained"]) -> tuple[Range, float] | None:
        """Smallest and largest number of rows over the cycles, and their mean (of the middles of ranges)."""
        found = [Range.exactly(c.rollout) if of == "rollout" else getattr(c, of) for c in self.cycles]
        if not found or None in found:
            return None
        middles = [(r.low + r.high) / 2 for r in found]
        return Range(min(r.low for r in found), max(r.high for r in found)), sum(middles) / len(middles)

    @property
    def whole_run(self) -> tuple[Range, Range] | None:
        """Rows of all cycles and evaluations, and those with gradients; None if not every cycle is counted."""
        if not self.cycles or len(self.cycles) != self.total_cycles or self.evaluation_count is None:
            return None
        rows = Range.exactly(self.evaluation_count * sum(e.rows for e in self.evaluations))
        trained = NOTHING
        for cycle in self.cycles:
            if cycle.network_rows is None or cycle.trained is None:
                return None
            rows, trained = rows + cycle.network_rows, trained + cycle.trained
        return rows, trained

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON; sizes in bytes."""
        fields = asdict(self)
        del fields["cycles"]
        first, run = self.cycles[0] if self.cycles else None, self.whole_run
        fields["parameters"], fields["trainable"] = self.parameters, self.trainable
        fields["held_bytes"], fields["peak_bytes"] = self.held_bytes, self.peak_bytes
        fields["rows"] = {
            "unit": self.unit,
            "counted_cycles": len(self.cycles),
            "first": None if first is None else {**asdict(first), "network_rows": _mapping(first.network_rows)},
            "over_cycles": {
                name: None if found is None else {**asdict(found[0]), "mean": found[1]}
                for name, found in ((name, self.spread(name)) for name in ("rollout", "network_rows", "trained"))
            },
            "evaluation": sum(e.rows for e in self.evaluations),
            "run": None if run is None else {"network_rows": asdict(run[0]), "trained": asdict(run[1])},
        }
        return fields


def _mapping(value: Range | None) -> dict[str, int] | None:
    return None if value is None else asdict(value)


def device_parts(parts: Sequence[MemoryPart], always: bool) -> list[MemoryPart]:
    """The parts on the device that are held all the time, or those that pass."""
    return [part for part in parts if part.place == "device" and part.always == always]

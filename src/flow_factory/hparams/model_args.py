"""Which model is trained and which of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.types import DType, PositiveInt, Section, option


@dataclass
class ModelArguments(Section):
    """The `model:` section."""

    model_type: str = option(
        help="Key of the model's adapter (`flow-factory list models`), or a dotted path to an adapter class. Required."
    )
    model_name_or_path: str = option(
        help="Folder or Hub id of the pipeline, or `builtin/<name>` for the one that ships with the package. "
        "Required: no default, because a silent download of many gigabytes helps nobody."
    )
    finetune_type: Literal["full", "lora"] = option(
        "lora", "lora: train low-rank adapters; full: train all parameters."
    )
    trainable_parameters_dtype: DType = option(
        "fp32",
        "dtype of the trained parameters: fp32, bf16 or fp16. bf16 swallows small updates: at 1e-6 the weights may "
        "never move.",
    )
    frozen_parameters_dtype: DType | dict[str, DType] | None = option(
        None,
        "dtype of the frozen parameters (fp32, bf16, fp16), one for all or one per component; null: follows "
        "mixed_precision.",
    )
    component_load_dtypes: dict[str, DType] = option(
        factory=dict, help="dtype (fp32, bf16, fp16) in which single components are loaded, by component name."
    )
    target_components: str | list[str] = option("transformer", "Components that are trained.")
    target_modules: str | list[str] = option(
        "all", "LoRA targets: `all` for the model's defaults, or a list of module name suffixes such as to_q."
    )
    lora_rank: PositiveInt = option(8, "Rank r of the LoRA matrices.")
    lora_alpha: PositiveInt | None = option(None, "LoRA scale alpha (the update is scaled by alpha / r); null: 2 r.")
    lora_init: Literal["default", "gaussian"] = option(
        "gaussian",
        "Initialisation of lora_A: gaussian, or default (PEFT's own: Kaiming uniform). lora_B starts at zero.",
    )
    lora_adapter_name: str = option("default", "Name of the trained LoRA adapter.")
    resume_path: str | None = option(None, "Weights to start from (not a run to go on with: that is train.resume).")
    resume_type: Literal["lora", "full", "state"] | None = option(
        None,
        "What resume_path holds: lora or full weights; null: found out. (A whole state: see train.resume.)",
    )
    attn_backend: str | None = option(None, "diffusers attention backend such as native or flash; null: its default.")

    def __post_init__(self) -> None:
        if self.lora_alpha is None:
            self.lora_alpha = 2 * self.lora_rank
        for name in ("model_type", "model_name_or_path", "lora_adapter_name"):
            if not getattr(self, name).strip():
                raise FieldError(name, "is empty; give a value.")
        if self.resume_type is not None and self.resume_path is None:
            raise FieldError("resume_type", "has no effect without resume_path; give the path, or remove it.")
        if self.resume_type == "state":
            raise FieldError(
                "resume_type",
                "is not read from resume_path: a run's whole state is gone on with by train.resume: PATH. To start "
                "from its weights alone, give the checkpoint's folder lora or full.",
            )
        if self.resume_type == "lora" and self.finetune_type == "full":
            raise FieldError(
                "resume_type",
                "cannot be used with finetune_type 'full': the LoRA would stay a LoRA. Use finetune_type: lora, or "
                "start from full weights.",
            )
        if isinstance(self.target_modules, list) and not self.target_modules:
            raise FieldError("target_modules", "is empty; write `all` or a list of module name suffixes.")
        if len(set(self.components)) < len(self.components):
            raise FieldError("target_components", f"{self.components} names a component twice; once is enough.")
        if "." in self.lora_adapter_name:
            raise FieldError("lora_adapter_name", f"{self.lora_adapter_name!r} cannot name an adapter; leave dots out.")
        if not self.components:
            raise FieldError("target_components", "is empty; name at least one component, e.g. transformer.")

    @property
    def components(self) -> list[str]:
        """`target_components` as a list."""
        return [self.target_components] if isinstance(self.target_components, str) else list(self.target_components)

    @property
    def resume_kind(self) -> Literal["lora", "full", "state"] | None:
        """What `resume_path` holds, "lora" or "full"; None if it is not given. ("state" is refused above.)"""
        if self.resume_path is None or self.resume_type is not None:
            return self.resume_type
        folder = Path(self.resume_path).expanduser()
        return "full" if any((folder / name).is_dir() for name in self.components) else "lora"

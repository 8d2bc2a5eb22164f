"""BaseAdapter: what every model shares, so that an adapter says only what is peculiar to its model.

A model is loading, one velocity, initial latents and decoding: the hooks of `hooks.py`. The denoising loop
(`rollout.py`), one step of it (`step.py`), LoRA and full copies (`lora.py`, `weights.py`), variants and snapshots,
dtypes and export live beside this file and are composed here.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flow_factory.contracts import Modality
from flow_factory.distributed import Comm
from flow_factory.errors import InputError, RunError
from flow_factory.hparams import Arguments, ConfigError, ModelSpec, get_model_spec
from flow_factory.hparams.builtin import resolve_builtin
from flow_factory.hparams.local_model import unfit_fields
from flow_factory.models import components, export, rollout, step
from flow_factory.models.bundle import ModelBundle, has_gradient_checkpointing
from flow_factory.models.hooks import ConditionT, ModelHooks
from flow_factory.models.initial import load_initial_weights, make_weights
from flow_factory.models.parallel import Parallel
from flow_factory.models.snapshots import Snapshot, load_strict
from flow_factory.models.variants import Variants
from flow_factory.models.weights import FIRST_ROLE, LoraWeights, Weights

REFERENCE = "reference"


class BaseAdapter(ModelHooks[ConditionT]):
    """A pipeline made trainable.

    Construction loads the pipeline, freezes it, and creates the live roles of the training arguments. The trainer then
    declares snapshots (`add_reference`, `add_snapshot`) and calls `prepare`, after which no variant can be added.

    Args:
        config: The configuration.
        comm: This rank's view of the process group; None is a single process.
        as_stored: For inference: leave weights as they lie in their files (see `components.place`).

    Attributes:
        bundle: The root of all trained components.
        weights: Their roles and snapshots.
        trained_components: Names of the components in training.
    """

    def __init__(self, config: Arguments, comm: Comm | None = None, *, as_stored: bool = False) -> None:
        self.config = config
        self.comm = comm or Comm.single()
        self.device = self.comm.device
        self.spec: ModelSpec = get_model_spec(config.model_args.model_type)
        model = config.model_args
        self._autocast_dtype = components.autocast_dtype(config.mixed_precision, self.device)
        self._dtypes = components.DtypePolicy.from_fields(
            model.trainable_parameters_dtype, model.frozen_parameters_dtype, self._autocast_dtype
        )
        self.trained_components: tuple[str, ...] = tuple(model.components)
        self.pipeline: Any = self.load_pipeline()
        self._modules = components.pipeline_modules(self.pipeline)
        self._check_components()
        components.freeze(self._modules.values())
        for name, module in self._modules.items():
            # Parts are loaded in the dtype they are held in; only those asked to load in another are cast.
            dtype = self._dtype_of(name) if name in model.component_load_dtypes else None
            components.place(module, self.device, dtype, as_stored=as_stored)
        self.bundle = ModelBundle({name: self._modules[name] for name in self.trained_components})
        self.weights: Weights = make_weights(
            config, self.spec, self.bundle, self.trained_components, self._dtypes.trainable
        )
        self.variants = Variants(self.weights)
        self.parallel = Parallel.create("replicated")
        self._root: nn.Module | None = None
        self._base_reference: Snapshot | None = None
        self._enable_gradient_checkpointing()

    # What the base does with it ------------------------------------------------------------------------------------

    inference = rollout.inference
    forward = step.forward
    predict = step.predict
    export_lora = export.export_lora
    save_full = export.save_full

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("inference", "forward", "predict"):
            if name in cls.__dict__:
                raise TypeError(
                    f"{cls.__name__} overrides {name}(), which is final: one rollout and one step serve sampling and "
                    f"replay. Override predict_velocity, network_state, sigma_grid or another hook."
                )

    @functools.cached_property
    def checkpoint(self) -> Path:
        """The local folder of `model.model_name_or_path`."""
        name = resolve_builtin(self.config.model_args.model_name_or_path, "model")
        return components.checkpoint_folder(name, self.spec.modular_components)

    def load_diffusers(self, cls: type[Any]) -> Any:
        """Loads a pipeline of a diffusers class from `model.model_name_or_path`, with the run's dtypes.

        Raises:
            ConfigError: If the model's own fields do not fit it, which `check` cannot know of one on the Hub.
        """
        problems = list(unfit_fields(self.config, self.checkpoint))
        if problems:
            raise ConfigError(problems)
        model = self.config.model_args
        names = {name: self._dtype_of(name) for name in [*self._dtypes.by_component, *self.trained_components]}
        dtypes = {**names, "default": self._dtypes.frozen}
        for name, dtype in model.component_load_dtypes.items():
            dtypes[name] = components.parse_dtype(dtype, f"model.component_load_dtypes.{name}")
        return components.load_pipeline_class(
            cls, self.checkpoint, dtypes, other_classes=self.spec.other_classes, workflow=self.spec.workflow
        )

    def network(self, name: str) -> Callable[..., Any]:
        """A component as a callable that goes through the prepared root if it is trained."""
        if self._root is None:
            self.prepare()
        route = self.weights.route(name)
        if route in self.bundle.component_names:
            assert self._root is not None
            return functools.partial(self._root, route)
        return self._modules[name]

    def network_input(self, name: str, tensor: Tensor) -> Tensor:
        """Casts an input to the component's own dtype where no autocast does it."""
        return tensor if self._autocast_dtype is not None else tensor.to(self._dtype_of(name))

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of one forward: the run's, whatever surrounds it; without a cache that could outlive it."""
        enabled = self._autocast_dtype is not None
        dtype = self._autocast_dtype or torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products: the autocast's, or that of the (first) trained component's own weights."""
        return self._autocast_dtype or self._dtype_of(self.trained_components[0])

    @functools.cached_property
    def _encoders(self) -> tuple[list[str], str]:
        """Names of the encoders and their tokenizers, and a digest of their files, which takes a while."""
        kinds = ("text_encoder", "tokenizer", "connectors")
        kinds += ("image_encoder", "image_processor", "feature_extractor", "processor")
        if self.spec.io.input_modalities != {Modality.TEXT}:
            kinds += ("vae", "audio_vae")
        names = [name for name in self.pipeline.components if name.startswith(kinds)]
        return names, components.folder_digest(self.checkpoint, names)

    def encoder_identity(self, generation: Any = None) -> str:
        """Identifies the encoders by content: bytes of their folders, dtypes and generation arguments.

        Args:
            generation: As in `encode_prompt`.
        """
        names, digest = self._encoders
        parts = {
            "files": digest,
            "dtypes": {name: str(self._dtype_of(name)) for name in names if name in self._modules},
            "generation": asdict(generation or self.config.train_generation),
            "adapter": f"{type(self).__module__}.{type(self).__qualname__}",
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    # Modes ---------------------------------------------------------------------------------------------------------

    def rollout(self) -> AbstractContextManager[None]:
        """Sampling mode: no dropout. Takes effect at once; as a context manager it also restores the former mode."""
        return self._mode(False)

    def eval(self) -> AbstractContextManager[None]:
        """Evaluation mode, as `rollout`."""
        return self._mode(False)

    def train(self) -> AbstractContextManager[None]:
        """Training mode, as `rollout` but with dropout."""
        return self._mode(True)

    def _mode(self, training: bool) -> AbstractContextManager[None]:
        before = self.bundle.training
        self.bundle.train(training)

        @contextmanager
        def restore() -> Iterator[None]:
            try:
                yield
            finally:
                self.bundle.train(before)

        return restore()

    # Variants and snapshots ----------------------------------------------------------------------------------------

    def trainable_parameters(self, role: str = FIRST_ROLE) -> dict[str, nn.Parameter]:
        """A role's parameters by stable names (their names in the bundle), in order."""
        if role not in self.weights.roles:
            raise self.weights.unknown(role)
        return self.weights.roles[role]

    def use_component_variant(self, variant: str | None) -> AbstractContextManager[None]:
        """Forwards inside see a role, a snapshot, or (None) the base beneath all LoRA adapters."""
        return self.variants.use(variant)

    def snapshot(self, name: str) -> AbstractContextManager[None]:
        """Forwards inside see the snapshot's weights, without gradients."""
        if name not in self.weights.snapshots:
            raise self.weights.unknown(name)
        return self.variants.use(name)

    def reference_policy(self) -> AbstractContextManager[None]:
        """Forwards inside see the reference: the pretrained base, or the run's start (`train.reference`)."""
        if REFERENCE in self.weights.snapshots:
            return self.variants.use(REFERENCE)
        if isinstance(self.weights, LoraWeights) and self.config.training_args.reference == "base":
            return self.variants.use(None)
        raise RunError("no reference was declared; call adapter.add_reference() before adapter.prepare().")

    def pin(self, role: str = FIRST_ROLE) -> AbstractContextManager[None]:
        """Holds a role from a differentiated forward until its backward; entering another variant inside raises."""
        return self.variants.pin(role)

    def add_snapshot(self, name: str, role: str = FIRST_ROLE, device: str = "auto") -> Snapshot:
        """Declares frozen float32 weights that start as the role's weights at the start of the run.

        Args:
            name: How to refer to it.
            role: Whose weights it follows.
            device: Where full copies are kept ("cpu" saves device memory); LoRA adapters stay with their layers.
        """
        if self._root is not None:
            raise RunError(f"snapshot {name!r} was declared after prepare(); declare variants before the optimizer.")
        return self.weights.add_snapshot(name, role, None if device == "auto" else torch.device(device))

    def add_reference(self, device: str = "auto") -> None:
        """Declares the reference. With LoRA and `reference: base` it needs no storage."""
        base = self.config.training_args.reference == "base"
        if REFERENCE in self.weights.snapshots or (base and isinstance(self.weights, LoraWeights)):
            return
        snapshot = self.add_snapshot(REFERENCE, device=device)
        if base:
            self._base_reference = snapshot

    def prepare(self) -> None:
        """Loads `model.resume_path`, lets all ranks start equal, fixes requires_grad and builds the root. Once."""
        if self._root is not None:
            return
        load_initial_weights(self.config, self.bundle, self.trained_components, self.weights)
        for parameters in self.weights.roles.values():
            self.parallel.broadcast_parameters(parameters.values(), self.comm)
        for snapshot in self.weights.snapshots.values():
            if snapshot is not self._base_reference:
                snapshot.copy_from_role()
        self.weights.freeze_choices()
        self._root = self.parallel.prepare(self.bundle)

    def variant_state(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """All roles and snapshots by parameter name, for checkpoints: {"roles": {...}, "snapshots": {...}}."""
        roles = {role: {n: p.detach() for n, p in params.items()} for role, params in self.weights.roles.items()}
        return {"roles": roles, "snapshots": {n: s.state_dict() for n, s in self.weights.snapshots.items()}}

    def load_variant_state(self, state: dict[str, dict[str, dict[str, Tensor]]]) -> None:
        """Restores `variant_state`, strictly.

        Raises:
            InputError: If roles, snapshots, names or shapes differ from this run's.
        """
        for kind, known in (("roles", self.weights.roles), ("snapshots", self.weights.snapshots)):
            if set(state[kind]) != set(known):
                raise InputError(f"the saved state has {kind} {sorted(state[kind])}; this run has {sorted(known)}.")
        for role, parameters in self.weights.roles.items():
            load_strict(parameters, state["roles"][role], f"role {role!r}")
        for name, snapshot in self.weights.snapshots.items():
            snapshot.load_state_dict(state["snapshots"][name])

    # Construction details ------------------------------------------------------------------------------------------

    def _dtype_of(self, name: str) -> torch.dtype:
        in_full = self.config.model_args.finetune_type == "full" and name in self.trained_components
        return self._dtypes.of(name, trained_in_full=in_full)

    def _check_components(self) -> None:
        for name in self.trained_components:
            if name not in self._modules:
                raise InputError(
                    f"model.target_components: the pipeline has no network {name!r}; it has {sorted(self._modules)}."
                )

    def _enable_gradient_checkpointing(self) -> None:
        if not self.config.training_args.enable_gradient_checkpointing:
            return
        for name in self.bundle.component_names:
            module: Any = self.bundle.component(name)
            if not has_gradient_checkpointing(module):
                raise InputError(f"train.enable_gradient_checkpointing: {type(module).__name__} does not support it.")
            module.enable_gradient_checkpointing()

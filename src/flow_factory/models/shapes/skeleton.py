"""The adapter of a run on networks that have shapes and no numbers, built from the checkpoint's config files alone.

Everything else about it is real: scheduler, tokenizers, LoRA layers, dtypes, guidance and grids are those of a run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.hparams import Arguments
from flow_factory.hparams.local_model import check_pipeline_folder, local_folder
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.components import load_pipeline_class
from flow_factory.models.modular import INDEX as MODULAR_INDEX
from flow_factory.models.registry import get_adapter_class

META = torch.device("meta")
# What a checkpoint has beside its weights: configs, and the files of every kind of tokenizer.
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def config_folder(name: str) -> Path:
    """The local folder of a checkpoint's config files; of a Hub name these are downloaded, and no weights.

    Args:
        name: `model.model_name_or_path`.

    Raises:
        InputError: If there is neither such a folder nor such a repository.
    """
    folder = local_folder(name)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_SMALL_FILES))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        include = " ".join(f"'{pattern}'" for pattern in _SMALL_FILES)
        raise InputError(
            f"model.model_name_or_path: the config files of {name!r} could not be downloaded: {reason}. Give a folder "
            f"that holds them, made where there is a connection: hf download {name} --include {include} --local-dir DIR"
        ) from error


def build_skeleton(config: Arguments) -> BaseAdapter[Any]:
    """The adapter of a run without weights. Its networks lie on the meta device, what it makes itself on the CPU.

    Args:
        config: The run's configuration; `mixed_precision` is not "auto". Weights at `model.resume_path` have the sizes
            of those they replace, and are not read.

    Raises:
        InputError: If a config file is missing or broken, or a component or LoRA target is unknown.
    """
    folder = config_folder(config.model_args.model_name_or_path)
    check_pipeline_folder(folder, config.spec)
    config = replace(config, model_args=replace(config.model_args, resume_path=None, resume_type=None))
    adapter = _skeleton_class(get_adapter_class(config.model_args.model_type), folder)(config, Comm(device=META))
    adapter.prepare()
    adapter.device = torch.device("cpu")
    return adapter


def _skeleton_class(adapter_class: type[BaseAdapter[Any]], folder: Path) -> type[BaseAdapter[Any]]:
    """The adapter's class with another way to load."""

    def load_diffusers(self: BaseAdapter[Any], pipeline_class: type[Any]) -> Any:
        modules = build_networks(folder, self.spec.modular_components)
        for name, module in modules.items():
            _cast(module, self._dtype_of(name))
        others = self.spec.other_classes
        return load_pipeline_class(
            pipeline_class, folder, modules=modules, other_classes=others, workflow=self.spec.workflow
        )

    return type(adapter_class.__name__, (adapter_class,), {"checkpoint": folder, "load_diffusers": load_diffusers})


def build_networks(folder: Path, modular_components: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Every network of a pipeline on the meta device, in float32, by component name.

    Args:
        folder: Holds the index, and `<component>/config.json` for each network.
        modular_components: Of a modular pipeline, the components among which the networks are made.

    Raises:
        InputError: Naming the file that is missing or cannot be used.
    """
    file = folder / (MODULAR_INDEX if modular_components else "model_index.json")
    index = json.loads(file.read_text(encoding="utf-8"))
    if modular_components:
        # Library and class of an entry are null where it was written without the component; its type is not.
        index = {name: index[name][2]["type_hint"] for name in modular_components}
    networks: dict[str, nn.Module] = {}
    for name, entry in index.items():
        if not isinstance(entry, list) or len(entry) != 2 or None in entry:
            continue
        cls = _component_class(name, *entry)
        if issubclass(cls, nn.Module):
            networks[name] = _network(cls, folder / name / "config.json")
    return networks


def _component_class(component: str, library: str, name: str) -> type[Any]:
    """The class that an entry of `model_index.json` names: of a library, or of the pipeline's own module."""
    module: Any = getattr(diffusers.pipelines, library, None)
    try:
        module = module or importlib.import_module(library)
        return getattr(module, name)
    except (ImportError, AttributeError) as error:
        versions = f"diffusers {diffusers.__version__}, transformers {transformers.__version__}"
        raise InputError(
            f"model_index.json makes {component!r} a {library}.{name}, which is not installed ({versions}); install "
            f"the version that the checkpoint was saved with, or a later one."
        ) from error


def _network(cls: type[Any], file: Path) -> nn.Module:
    if not file.is_file():
        raise InputError(
            f"{file} is missing, so the sizes of the {cls.__name__} are not known; copy it from the checkpoint (the "
            f"weights beside it are not needed)."
        )
    try:
        with META:
            if issubclass(cls, ModelMixin):
                network: Any = cls  # the loading methods come from a mixin of its subclasses
                return network.from_config(network.load_config(file.parent)).eval()
            return cls(cls.config_class.from_pretrained(file.parent)).eval()
    except (OSError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise InputError(f"{file} does not describe a {cls.__name__}: {type(error).__name__}: {error}") from error


@torch.no_grad()
def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts as the libraries do on loading: what a network keeps in float32 stays in it."""
    # Buffers that are no part of the checkpoint are cast by diffusers alone, and not where something stays float32.
    all_buffers = isinstance(module, ModelMixin) and module._keep_in_fp32_modules is None
    loaded = set(module.state_dict())
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and (all_buffers or name in loaded):
            tensor.data = tensor.data.to(torch.float32 if _stays_float32(module, name, dtype) else dtype)


def _stays_float32(module: nn.Module, name: str, dtype: torch.dtype) -> bool:
    """Whether a parameter is left in float32 although its network is held in `dtype`."""
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    # diffusers keeps these in any precision, transformers in float16 alone.
    if isinstance(module, ModelMixin) or dtype == torch.float16:
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return dtype != torch.float32 and any(f".{part}." in f".{name}." for part in kept)

"""Loading a pipeline's parts: where the checkpoint lies, in which dtype each part is held, and who it is."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from torch import nn

from flow_factory.errors import InputError
from flow_factory.models.long_prompts import tell_once
from flow_factory.models.modular import INDEX, download, load_workflow

_LONG_LOAD_BYTES = 1_000_000_000
# Pipelines read hidden states of language models and never their logits, and some repositories leave the head out.
_UNREAD = ("lm_head.",)

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def parse_dtype(name: str, place: str) -> torch.dtype:
    """The dtype called `name`.

    Raises:
        InputError: Naming `place`, the configuration field.
    """
    if name not in DTYPES:
        raise InputError(f"{place}: {name!r} is not a dtype. Known: {', '.join(DTYPES)}.")
    return DTYPES[name]


def autocast_dtype(mixed_precision: str, device: torch.device) -> torch.dtype | None:
    """The compute dtype of forwards, or None for no autocast.

    Args:
        mixed_precision: "no", "bf16", "fp16" or "auto" (bf16 on a CUDA device that has it, else "no").
        device: Where forwards run.

    Raises:
        InputError: For another value.
    """
    if mixed_precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else None
    if mixed_precision == "no":
        return None
    if mixed_precision in ("bf16", "fp16"):
        return DTYPES[mixed_precision]
    raise InputError(f"mixed_precision: {mixed_precision!r} is not one of 'auto', 'no', 'bf16', 'fp16'.")


_DECODERS = ("vae", "audio_vae", "vocoder")
"""Components that make media of latents, where a pipeline has them."""


@dataclass(frozen=True)
class DtypePolicy:
    """In which dtype each component is held.

    Attributes:
        trainable: Master weights of what is trained; fp32 unless asked otherwise, because a bf16 weight swallows
            updates below 1/256 of its size.
        frozen: Default of everything else.
        by_component: Exceptions, by component name.
    """

    trainable: torch.dtype
    frozen: torch.dtype
    by_component: Mapping[str, torch.dtype]

    @classmethod
    def from_fields(
        cls, trainable: str, frozen: str | Mapping[str, str] | None, compute: torch.dtype | None
    ) -> DtypePolicy:
        """Reads the two `model.*_parameters_dtype` fields.

        Args:
            trainable: `trainable_parameters_dtype`.
            frozen: `frozen_parameters_dtype`: one dtype, a dtype per component, or None: the compute dtype, except for
                what makes media of latents, which stays fp32: in half precision pictures band, sounds hiss, and either
                overflows.
            compute: The autocast dtype, or None.
        """
        place = "model.frozen_parameters_dtype"
        master = parse_dtype(trainable, "model.trainable_parameters_dtype")
        default = compute or torch.float32
        if isinstance(frozen, str):
            return cls(master, parse_dtype(frozen, place), {})
        exceptions: dict[str, torch.dtype] = dict.fromkeys(_DECODERS, torch.float32)
        for name, dtype in (frozen or {}).items():
            exceptions[name] = parse_dtype(dtype, f"{place}.{name}")
        return cls(master, exceptions.get("default", default), exceptions)

    def of(self, component: str, *, trained_in_full: bool) -> torch.dtype:
        """The dtype of a component's own weights (LoRA adapters inside it are always `trainable`)."""
        return self.trainable if trained_in_full else self.by_component.get(component, self.frozen)


def checkpoint_folder(path: str, modular_components: Collection[str] = ()) -> Path:
    """The local folder of a checkpoint; a hub name is downloaded (or found in the cache).

    Args:
        path: Folder or name on the Hub.
        modular_components: Of a modular pipeline, the components that are needed.

    Raises:
        InputError: If there is neither such a folder nor such a repository.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise InputError(f"model.model_name_or_path: there is no folder {path!r}.")
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return download(path, modular_components) if modular_components else Path(str(DiffusionPipeline.download(path)))
    except (OSError, HfHubHTTPError, ValueError, AttributeError) as error:  # the last: a class not in diffusers
        # The rest of the Hub's message speaks of its own arguments and of a traceback that is not shown.
        reason = str(error).split(" (Cannot find")[0].removeprefix(f"Cannot load model {path}: ")
        raise InputError(
            f"model.model_name_or_path: {path!r} is neither a folder nor a model that could be downloaded: {reason} "
            f"Without a connection, copy the checkpoint's folder here and give its path."
        ) from error


def load_pipeline_class(
    cls: type[Any],
    folder: Path,
    dtypes: Mapping[str, torch.dtype] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
    other_classes: Collection[str] = (),
    workflow: str | None = None,
) -> Any:
    """Loads a diffusers pipeline on CPU, each component in its own dtype.

    Args:
        cls: The pipeline class.
        folder: The checkpoint.
        dtypes: Component name to dtype; "default" covers the rest.
        modules: Components that are there already; the folder's are not loaded.
        other_classes: Names of further classes whose folders can be loaded as `cls`.
        workflow: Of a modular pipeline class, the workflow whose components are loaded.

    Raises:
        InputError: If the folder holds another kind of pipeline or cannot be read.
    """
    path = str(folder)
    index_file = folder / ("model_index.json" if workflow is None else INDEX)
    if not index_file.is_file():
        raise InputError(f"model.model_name_or_path: {path!r} has no {index_file.name}; it is no {cls.__name__}.")
    index = json.loads(index_file.read_text())
    if index.get("_class_name") not in (cls.__name__, *other_classes):
        raise InputError(
            f"model.model_name_or_path: {path!r} holds a {index.get('_class_name')}, but model.model_type needs a "
            f"{cls.__name__}. Change one of the two."
        )
    tell_once()
    dtypes = dict(dtypes or {"default": torch.float32})
    # `from_pretrained` reads [null, null] as "missing" unless the caller says that the part is meant to be absent.
    parameters = inspect.signature(cls.__init__).parameters
    absent = {name: None for name, value in index.items() if name in parameters and value == [None, None]}
    keyword = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"
    keywords: dict[str, Any] = {keyword: dtypes, **absent, **(modules or {})}
    with _reading(folder):
        if workflow is not None:
            pipeline = load_workflow(cls, folder, workflow, dtypes, modules)
        else:
            pipeline = cls.from_pretrained(str(folder), **keywords)
        for name, module in pipeline_modules(pipeline).items():
            if name not in (modules or {}):
                _refuse_lacking(folder / name, [key for key, value in module.state_dict().items() if value.is_meta])
        return pipeline


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """What is done inside reads a checkpoint, and its errors speak of that."""
    try:
        with _progress_bars(sys.stderr.isatty() and _size(folder) > _LONG_LOAD_BYTES), _nothing_drawn():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the engines have errors of their own for each thing that a folder can lack
        reason = _damaged_file(folder) or _in_words(error)
        raise InputError(f"model.model_name_or_path: {str(folder)!r} could not be loaded: {reason}") from error


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Weights that a file lacks are an error: transformers draws them at random (diffusers leaves them on "meta")."""
    given = transformers.PreTrainedModel.__dict__["from_pretrained"]

    def from_pretrained(cls: type[Any], name: Any, *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("output_loading_info"):
            return given.__func__(cls, name, *arguments, **keywords)
        model, found = given.__func__(cls, name, *arguments, output_loading_info=True, **keywords)
        _refuse_lacking(Path(name) / (keywords.get("subfolder") or ""), found["missing_keys"])
        return model

    transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[method-assign]
    try:
        yield
    finally:
        transformers.PreTrainedModel.from_pretrained = given  # type: ignore[method-assign]


def _refuse_lacking(folder: Path, names: Collection[str]) -> None:
    """Raises a ValueError if there are weights that the files of a component do not hold, and that something reads."""
    read = sorted(name for name in names if not name.startswith(_UNREAD))
    if read:
        first = ", ".join(read[:3]) + (", ..." if len(read) > 3 else "")
        raise ValueError(
            f"the weights in {folder} lack {len(read)} tensor(s) that its config.json asks for: {first}. Copy the "
            f"folder again, or use the config.json that belongs to the weights."
        )


def _damaged_file(folder: Path) -> str | None:
    """Which weights file is cut off or no safetensors at all; the engines' messages often leave out its name."""
    for file in sorted(folder.glob("*/*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{file} is damaged ({error}); copy it again."
    return None


def _in_words(error: Exception) -> str:
    text = str(error).strip()
    return text if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hides the engines' loading bars unless someone is watching and there is something to wait for."""
    if shown:
        yield
        return
    engines = (diffusers.utils.logging, transformers.utils.logging)
    before = [engine.is_progress_bar_enabled() for engine in engines]
    for engine in engines:
        engine.disable_progress_bar()
    try:
        yield
    finally:
        for engine, enabled in zip(engines, before, strict=True):
            if enabled:
                engine.enable_progress_bar()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def pipeline_modules(pipeline: Any) -> dict[str, nn.Module]:
    """The pipeline's neural networks by component name."""
    return {name: module for name, module in pipeline.components.items() if isinstance(module, nn.Module)}


def freeze(modules: Iterable[nn.Module]) -> None:
    """Turns gradients and dropout off."""
    for module in modules:
        module.requires_grad_(False)
        module.eval()


def place(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None, as_stored: bool = False) -> None:
    """Moves a module, and gives weights that lie unaligned in a mapped file storage of their own.

    Matrix products on CPU round differently for operands that are not aligned to 64 bytes, so the same weights read
    from another file layout would give other bits.

    Args:
        module: The module.
        device: Where it goes.
        dtype: Cast to this; None keeps it.
        as_stored: Leave weights as they lie in the file, so that the bits are those of another program that maps it.
    """
    module.to(device=device)
    if dtype is not None:
        module.to(dtype=dtype)
    if as_stored:
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type == "cpu" and tensor.data_ptr() % 64 != 0:
            tensor.data = tensor.data.clone()


def folder_digest(folder: Path, subfolders: Iterable[str]) -> str:
    """A SHA-256 over the names and bytes of all files below some of a checkpoint's folders.

    A file of the hub's cache is a link to a blob named by its own SHA-256; that name is taken for the bytes.
    """
    digest = hashlib.sha256()
    for subfolder in sorted(subfolders):
        for file in sorted(p for p in (folder / subfolder).rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(folder).as_posix()}\0{_file_digest(file)}\0".encode())
    return digest.hexdigest()


def _file_digest(file: Path) -> str:
    blob = file.resolve()
    if blob.parent.name == "blobs" and len(blob.name) == 64:
        return blob.name
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()

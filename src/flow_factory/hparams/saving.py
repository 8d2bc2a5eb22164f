"""Writes a configuration so that it loads back to an equal object, and compares two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flow_factory.hparams.arguments import SECTIONS, Arguments, LauncherArguments, optimizer_from_train
from flow_factory.hparams.yaml_source import resolve_plain

# May change when a run is resumed: how long it goes on, how it is watched, and on what it is launched.
_FREE_ON_RESUME: tuple[tuple[str, ...], ...] = (
    ("log",),
    ("eval",),
    ("eval_rewards",),
    ("launcher",),
    ("config_file",),
    ("plugins",),
    ("num_processes",),
    ("main_process_port",),
    ("process_index",),
    ("local_process_index",),
    ("num_machines",),
    ("gpus_per_node",),
    ("machine_rank",),
    ("main_process_ip",),
    ("train", "max_epochs"),
    ("train", "max_steps"),
    ("train", "resume"),
    ("train", "signal_deadline_s"),
    ("train", "ema_device"),
    ("train", "ref_param_device"),
    ("train", "offload_samples_to_cpu"),
    ("data", "cache_dir"),
    ("data", "dataloader_num_workers"),
    ("data", "preprocessing_batch_size"),
    ("data", "enable_preprocess"),
    ("data", "force_reprocess"),
    ("data", "preprocess_parallelism"),
)


def to_mapping(config: Arguments) -> dict[str, Any]:
    """The configuration as plain data, sections in the order of the documentation."""
    mapping: dict[str, Any] = {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(LauncherArguments)}
    for section, attribute in SECTIONS.items():
        mapping[section] = _plain(getattr(config, attribute))
    mapping["rewards"] = mapping["rewards"]["reward_configs"]
    if mapping["eval_rewards"] is not None:
        mapping["eval_rewards"] = mapping["eval_rewards"]["reward_configs"]
    mapping["train"]["trainer_type"] = config.trainer_key
    mapping["train"].update(_plain(config.train_generation))
    mapping["eval"].update(_plain(config.eval_generation))
    for section in ("train", "eval"):
        # Settled into `resolution`; written as well, they would win over a later override of the resolution.
        del mapping[section]["height"], mapping[section]["width"]
    if config.optimizer_args == [optimizer_from_train(config.training_args)]:
        del mapping["optimizers"]  # says the same as the short form in `train:`
    for optimizer in mapping.get("optimizers", []):
        foreign = ("betas",) if optimizer["optimizer"] == "muon" else ()
        for name in foreign:
            del optimizer[name]
    return mapping


def fingerprint_mapping(config: Arguments) -> dict[str, Any]:
    """What must not change when a run is resumed."""
    mapping = to_mapping(config)
    decays = any(entry.lr_scheduler != "constant" for entry in config.optimizer_args)
    for path in _FREE_ON_RESUME:
        if decays and path in (("train", "max_epochs"), ("train", "max_steps")):
            continue  # the learning rate decays towards the end, so another end is another run
        section = mapping if len(path) == 1 else mapping.get(path[0], {})
        section.pop(path[-1], None)
    for reward in mapping["rewards"]:
        for name in ("num_workers", "device", "batch_size"):
            reward.pop(name, None)
    return mapping


def diff_mappings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ, each with both values: `train.seed: 42 -> 43`."""
    return _diff(a, b, "")


def save_config(config: Arguments, path: str | Path) -> None:
    """Writes the resolved configuration as YAML."""
    Path(path).write_text(dump_yaml(to_mapping(config)), encoding="utf-8")


def dump_yaml(mapping: Any) -> str:
    """YAML text that `parse_yaml` reads back to the same values."""
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Quoted where our reader (or another's YAML 1.1 reader) would take the bare text for something else.
    quoted = not isinstance(resolve_plain(text), str) or text.lower() in ("yes", "no", "on", "off", "y", "n")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted or "\n" in text else None)


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text:  # 1e-05: a number to YAML 1.2, text to YAML 1.1
        text = text.replace("e", ".0e", 1)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    inline = all(not isinstance(item, (list, Mapping)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=inline)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(float, _represent_float)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


_ABSENT = object()


def _diff(a: Any, b: Any, prefix: str) -> list[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: list[str] = []
        for key in [*a, *(key for key in b if key not in a)]:
            found += _diff(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{prefix}.{key}" if prefix else str(key))
        return found
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(x, Mapping) for x in a):
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in _diff(x, y, f"{prefix}[{i}]")]
    if type(a) is type(b) and a == b:
        return []
    return [f"{prefix}: {_show(a)} -> {_show(b)}"]


def _show(value: Any) -> str:
    return "(not given)" if value is _ABSENT else repr(value)

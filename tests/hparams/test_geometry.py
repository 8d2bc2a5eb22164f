"""The numbers of a cycle: which hold, what they give, and that the remedies named in errors do hold."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from flow_factory.hparams import Arguments, ConfigError, plan_geometry
from tests.hparams import test_loading
from tests.hparams.helpers import load, merged, problems_of


def config_for(
    batch: int = 8, group: int = 8, unique: int = 8, steps: int = 2, sampler: str = "auto", **more: Any
) -> Arguments:
    """A configuration whose own geometry (one process) is set aside: the tests call plan_geometry themselves."""
    config = load(merged({"scheduler": {"num_sde_steps": 2}}, more))
    args = config.training_args
    args.per_device_batch_size, args.group_size, args.unique_sample_num_per_epoch = batch, group, unique
    args.gradient_step_per_epoch = steps
    config.data_args.sampler_type = sampler  # type: ignore[assignment]
    return config


def rules_hold(sampler: str, world: int, batch: int, group: int, unique: int, steps: int) -> bool:
    """The rules of the design page, written down a second time."""
    holds = unique % (world * batch * steps // math.gcd(group, world * batch)) == 0
    if sampler == "group_contiguous":
        holds = holds and unique % world == 0 and (unique // world) * group % batch == 0
    if sampler == "group_distributed":
        holds = holds and group % world == 0 and (world * batch) % group == 0
    return holds


@pytest.mark.parametrize("sampler", ["distributed_k_repeat", "group_contiguous", "group_distributed"])
def test_rules_and_counts_over_a_table(sampler: str) -> None:
    """Pitfall 10 (static part): the optimizer steps of a cycle are those asked for, or the numbers are refused."""
    config = config_for(sampler=sampler)
    args = config.training_args
    held = 0
    for world, batch, group, unique, steps in itertools.product(
        (1, 2, 3, 4), (1, 2, 3, 4, 6), (2, 3, 4, 8), (1, 2, 4, 6, 12), (1, 2, 3)
    ):
        args.per_device_batch_size, args.group_size = batch, group
        args.unique_sample_num_per_epoch, args.gradient_step_per_epoch = unique, steps
        if not rules_hold(sampler, world, batch, group, unique, steps):
            with pytest.raises(ConfigError):
                plan_geometry(config, world)
            continue
        held += 1
        plan = plan_geometry(config, world)
        assert plan.sampler == sampler
        assert plan.batches_per_cycle * world * batch == unique * group
        assert plan.loss_terms == 2
        assert plan.accumulation_steps == plan.batches_per_cycle * 2 // steps
        assert plan.updates_per_cycle == steps
        assert plan.updates_per_cycle * plan.accumulation_steps == plan.batches_per_cycle * 2
    assert held > 50


@pytest.mark.parametrize(
    ("world", "batch", "group", "unique", "sampler"),
    [
        (1, 8, 8, 8, "group_contiguous"),
        (2, 4, 8, 4, "group_contiguous"),
        (8, 9, 24, 48, "group_contiguous"),
        (2, 4, 8, 3, "distributed_k_repeat"),  # 3 prompts cannot be dealt to 2 ranks whole
        (2, 8, 16, 3 * 2, "group_contiguous"),
        (4, 4, 8, 2 * 2, "group_contiguous"),
        (3, 4, 12, 4, "distributed_k_repeat"),  # 4 prompts cannot be dealt to 3 ranks whole
    ],
)
def test_auto_takes_rank_local_where_it_fits(world: int, batch: int, group: int, unique: int, sampler: str) -> None:
    config = config_for(batch, group, unique, steps=2 if unique % world == 0 else 1)
    assert rules_hold(sampler, world, batch, group, unique, config.training_args.gradient_step_per_epoch)
    assert plan_geometry(config, world).sampler == sampler


@pytest.mark.parametrize("sampler", ["auto", "distributed_k_repeat", "group_contiguous", "group_distributed"])
def test_the_numbers_that_an_error_names_do_hold(sampler: str) -> None:
    names = {
        "unique_sample_num_per_epoch": "unique",
        "per_device_batch_size": "batch",
        "group_size": "group",
    }
    tried = 0
    for world, batch, group, unique, steps in itertools.product((1, 2, 3), (3, 5, 8), (4, 6), (5, 7, 10), (2, 3)):
        numbers = {"batch": batch, "group": group, "unique": unique, "steps": steps}
        try:
            plan_geometry(config_for(**numbers, sampler=sampler), world)
            continue
        except ConfigError as error:
            message = str(error)
        assert f"W={world}" in message and f"B={batch}" in message
        assert f"K={group}" in message and f"M={unique}" in message
        for name, values in re.findall(r"(\w+) (\d+(?: or \d+)?)(?=[,.])", message.split("These would:")[-1]):
            for value in values.split(" or "):
                tried += 1
                plan_geometry(config_for(**{**numbers, names[name]: int(value)}, sampler=sampler), world)
    assert tried > 20


def test_older_names_are_aliases() -> None:
    for new, old in (
        ("global_random", "distributed_k_repeat"),
        ("rank_local", "group_contiguous"),
        ("global_batch", "group_distributed"),
    ):
        assert plan_geometry(config_for(sampler=new), 1) == plan_geometry(config_for(sampler=old), 1)


def test_samplers_agree_with_the_sampler_that_runs() -> None:
    samplers = pytest.importorskip("flow_factory.data_utils.samplers")
    config = config_for()
    for sampler in ("distributed_k_repeat", "group_contiguous", "group_distributed", "contiguous_shard"):
        for world, batch, group, unique in ((1, 8, 8, 8), (2, 4, 8, 4), (2, 8, 8, 4), (4, 2, 4, 8)):
            args = config.training_args
            args.per_device_batch_size, args.group_size, args.unique_sample_num_per_epoch = batch, group, unique
            config.data_args.sampler_type = sampler
            plan = plan_geometry(config, world)
            share = samplers.SourceShare("default", 0, 100, plan.per_source["default"])
            real = samplers.GroupSampler(
                plan.sampler, [share], group_size=group, batch_size=batch, world_size=world, seed=0
            )
            assert real.batches_per_cycle == plan.batches_per_cycle


def test_explicit_accumulation() -> None:
    config = config_for(batch=4, group=8, unique=4)  # 8 batches x 2 loss terms
    config.training_args.gradient_accumulation_steps = 4
    plan = plan_geometry(config, 1)
    assert (plan.accumulation_steps, plan.updates_per_cycle) == (4, 4)
    config.training_args.num_inner_epochs = 3
    assert plan_geometry(config, 1).updates_per_cycle == 12
    config.training_args.gradient_accumulation_steps = 5
    with pytest.raises(ConfigError, match=r"is 5, but 8 batches x 2 loss terms = 16 .* one of \[1, 2, 4, 8, 16\]"):
        plan_geometry(config, 1)


def test_loss_terms_known_later_replace_the_bound() -> None:
    config = config_for(scheduler={"num_sde_steps": None})
    assert plan_geometry(config, 1).loss_terms == 9  # of 10 steps all but the last
    assert plan_geometry(config, 1, loss_terms=5).accumulation_steps == 8 * 5 // 2
    config = config_for(scheduler={"num_sde_steps": None, "sde_steps": [0, 1, 2]})
    assert plan_geometry(config, 1).loss_terms == 3


def datasets(**numbers: Any) -> dict[str, Any]:
    return {
        "datasets": [
            {"name": name, "dataset_dir": name, "train": spec if isinstance(spec, dict) else {"weight": spec}}
            for name, spec in numbers.items()
        ]
    }


def test_several_datasets_share_by_weight() -> None:
    config = config_for(unique=8, data=datasets(a=1, b=3))
    assert plan_geometry(config, 1).per_source == {"a": 2, "b": 6}
    config = config_for(unique=8, data=datasets(a={"enabled": False}, b={}))
    assert plan_geometry(config, 1).per_source == {"b": 8}
    config = config_for(unique=9, steps=1, data=datasets(a=1, b=3))
    with pytest.raises(ConfigError, match=r"is 9, but must be a multiple of 4.*\(a 1, b 3\); use 8 or 12"):
        plan_geometry(config, 1)
    nothing = datasets(a={"enabled": False}, b={"enabled": False})
    assert "enable at least one" in problems_of({"data": {"dataset_dir": "data", **nothing}})["data.datasets"]


def test_a_batch_has_one_source() -> None:
    """The whole cycle fills whole batches, but one dataset's part does not."""
    config = config_for(batch=16, group=8, unique=4, steps=1, data=datasets(a=1, b=3))
    with pytest.raises(ConfigError, match=r"a's prompts=1 must be a multiple of 2") as caught:
        plan_geometry(config, 1)
    assert "unique_sample_num_per_epoch 8" in str(caught.value)
    assert plan_geometry(config_for(batch=16, group=8, unique=8, steps=1, data=datasets(a=1, b=3)), 1)


def test_own_numbers_of_datasets() -> None:
    spec = {"unique_sample_num_per_epoch": 2}
    config = config_for(unique=8, data=datasets(a=spec, b={"unique_sample_num_per_epoch": 6}))
    assert plan_geometry(config, 1).per_source == {"a": 2, "b": 6}
    with pytest.raises(ConfigError, match="those of the datasets add up to 8"):
        plan_geometry(config_for(unique=16, data=datasets(a=spec, b={"unique_sample_num_per_epoch": 6})), 1)
    found = problems_of({"data": {"dataset_dir": "data", **datasets(a=spec, b={})}})
    assert "given for a but not for b" in found["data.datasets"]
    found = problems_of({"data": {"dataset_dir": "data", **datasets(a={"num_batches_per_epoch": 3})}})
    assert "is 3, but 8 prompts x 8 samples make 8 batches" in found["data.datasets[0].train.num_batches_per_epoch"]
    assert load({"data": {"dataset_dir": "data", **datasets(a={"num_batches_per_epoch": 8})}})


def test_asynchronous_rewards_need_groups_on_a_rank() -> None:
    rewards = {"reward_model": "brightness", "async_reward": True}
    assert plan_geometry(config_for(rewards=rewards), 2).sampler == "group_contiguous"
    with pytest.raises(ConfigError, match=r"'default' is asynchronous.*use group_contiguous or auto"):
        plan_geometry(config_for(rewards=rewards, sampler="distributed_k_repeat"), 2)
    with pytest.raises(ConfigError, match=r"sampler group_contiguous.*M=4 must be divisible by W=3"):
        plan_geometry(config_for(4, 12, 4, 1, rewards=rewards), 3)


def test_geometry_is_checked_while_loading() -> None:
    found = problems_of({"train": {"unique_sample_num_per_epoch": 7}})
    assert "M=7 must be a multiple of 2" in found["train.unique_sample_num_per_epoch"]


def test_offline_trainers_have_no_groups() -> None:
    import flow_factory.hparams as hparams

    mapping = {
        "model": {"model_type": "sd3-5", "model_name_or_path": "org/model"},
        "train": {
            "trainer_type": f"{test_loading.__name__}.OutsideOfflineTrainer",
            "gradient_accumulation_steps": 3,
            "per_device_batch_size": 2,
        },
    }
    plan = plan_geometry(hparams.load_config_from_mapping(mapping), 2)
    assert (plan.accumulation_steps, plan.group_size, plan.batch_size) == (3, 1, 2)


def test_description_names_the_numbers() -> None:
    text = plan_geometry(config_for(), 1).describe()
    assert "8 prompts x 8 samples = 64 samples" in text
    assert "8 backward passes per optimizer step, 2 optimizer steps per cycle" in text

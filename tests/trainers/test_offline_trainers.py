"""sft and offline-dpo on a random pipeline: their losses, draws, evaluation, and what follows them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.errors import InputError
from flow_factory.hparams.training_times import TimeSampling
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from flow_factory.samples import ComponentTimes, LatentState, NoiseKey, Purpose, StepTimes
from flow_factory.scheduler.training_times import draw_sigmas
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.offline.noised_arms import noised_arms
from flow_factory.trainers.offline.offline_dpo import OfflineDPOTrainer
from tests.trainers.offline_support import KINDS, make_dataset, offline_mapping, offline_trainer, trainer_for
from tests.trainers.support import base_mapping, weights
from tests.trainers.test_resume import metrics


def gradients(trainer: BaseTrainer) -> list[dict[str, torch.Tensor]]:
    """Runs it; the gradients of each optimizer step, after reduction and before clipping."""
    found: list[dict[str, torch.Tensor]] = []
    optimizer = trainer.roles.primary.optimizers["adamw"]
    step = optimizer.step

    def keep(*args: Any) -> Any:
        parameters = trainer.adapter.trainable_parameters()
        found.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        return step(*args)

    optimizer.step = keep  # type: ignore[method-assign]
    trainer.start()
    return found


@pytest.mark.parametrize("key", KINDS)
def test_a_run_learns_and_counts(tiny_sd3_dir: Path, tmp_path: Path, key: str) -> None:
    trainer = trainer_for(tiny_sd3_dir, tmp_path, key)
    before = weights(trainer)
    result = trainer.start()
    assert trainer.progress.data_epoch == 2 and trainer.progress.rollout_iteration == 0
    assert result.counts["optimizer_steps"] == 4 == len(result.losses)
    assert trainer.reward_buffer is None and trainer.advantage_processor is None
    assert any(not torch.equal(before[name], after) for name, after in weights(trainer).items())


def test_sft_descends_the_error_written_out(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """The first loss, from pictures on disk to a number, without the trainer's own path."""
    changes: dict[str, Any] = {
        "train__max_steps": 1, "train__weighting_scheme": "uniform", "train__time_shift": 2.0,
        "train__timestep_range": [0.2, 0.9], "train__gradient_accumulation_steps": 1,
    }  # fmt: skip
    trainer = trainer_for(tiny_sd3_dir, tmp_path, **changes)
    adapter = trainer.adapter
    assert isinstance(adapter, SD3_5Adapter)
    trainer.dataloader.sampler.set_epoch(0)
    batch = next(iter(trainer.dataloader))
    sampling = TimeSampling("uniform", 1, (0.2, 0.9), 2.0)
    errors = []
    with torch.no_grad():
        for entry in batch.entries:
            pixels = np.asarray(Image.open(entry.example.arms["target"][0].path), dtype=np.float32)
            tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
            vae = adapter.pipeline.vae
            x0 = (vae.encode(tensor).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor
            key = NoiseKey(7, 0, entry.example.example_id, 0)
            sigma = draw_sigmas(sampling, 1, key.generator(Purpose.TRAIN_TIME))
            assert 0.1 <= sigma.item() <= 0.8
            noise = torch.randn(x0.shape[1:], generator=key.generator(Purpose.TRAIN_NOISE))[None]
            condition = adapter.encode_prompt([entry.example.record.prompt])
            velocity = adapter.pipeline.transformer(
                hidden_states=(1 - sigma) * x0 + sigma * noise,
                timestep=1000 * sigma,
                encoder_hidden_states=condition.prompt_embeds,
                pooled_projections=condition.pooled_prompt_embeds,
            ).sample
            errors.append((velocity - (noise - x0)).pow(2).mean().item())
    assert trainer.start().losses == [pytest.approx(sum(errors) / len(errors), rel=1e-5)]


def test_dpo_starts_at_log_two_and_follows_its_gradient(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """With the policy at the reference the gradient is (beta / 4) grad (m_chosen - m_rejected)."""
    trainer = trainer_for(
        tiny_sd3_dir, tmp_path, "offline-dpo", train__max_steps=1, train__gradient_accumulation_steps=1,
        train__max_grad_norm=None, train__beta=30.0,
    )  # fmt: skip
    adapter = trainer.adapter
    trainer.dataloader.sampler.set_epoch(0)
    batch = next(iter(trainer.dataloader))
    arguments: Any = trainer.training_args
    (arms,) = noised_arms(adapter, batch, arguments.time_sampling, seed=7, data_epoch=0)
    difference = torch.zeros(())
    for arm, sign in (("chosen", 1), ("rejected", -1)):
        noised = arms[arm]
        velocity = adapter.predict(noised.state, noised.times, batch.condition, adapter.guidance(1.0)).only
        difference = difference + sign * (velocity - noised.target.only).pow(2).mean(dim=(1, 2, 3)).mean()
    parameters = adapter.trainable_parameters()
    names, leaves = list(parameters), list(parameters.values())
    expected = torch.autograd.grad(30.0 / 4 * difference, leaves, allow_unused=True)
    (found,) = gradients(trainer)
    assert trainer.result.losses == [pytest.approx(math.log(2), abs=1e-12)]
    for name, gradient in zip(names, expected, strict=True):
        if gradient is None:
            assert name not in found or not found[name].any()
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)
    assert any(gradient is not None and bool(gradient.any()) for gradient in expected)


def test_arms_share_condition_noise_and_time(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen, rejected and their references see one condition, one noise and one time."""
    trainer = trainer_for(tiny_sd3_dir, tmp_path, "offline-dpo", train__max_steps=1, train__num_train_timesteps=2)
    seen: list[tuple[LatentState, ComponentTimes, Any, bool]] = []
    prepared: list[Any] = []
    predict, prepare = SD3_5Adapter.predict, SD3_5Adapter.prepare_condition_state

    def watched(self: Any, state: LatentState, times: ComponentTimes, condition: Any, guidance: Any) -> LatentState:
        assert guidance.scale == 1.0
        seen.append((state, times, condition, torch.is_grad_enabled()))
        return predict(self, state, times, condition, guidance)

    def counted(self: Any, condition: Any) -> Any:
        prepared.append(condition)
        return prepare(self, condition)

    monkeypatch.setattr(SD3_5Adapter, "predict", watched)
    monkeypatch.setattr(SD3_5Adapter, "prepare_condition_state", counted)
    trainer.start()
    assert len(prepared) == 2, "once per batch, not per time"
    assert len(seen) == 2 * 2 * 4, "two batches, two times, two arms under policy and reference"
    for start in range(0, len(seen), 4):
        call = seen[start : start + 4]
        assert [graded for *_, graded in call] == [False, False, True, True], "the trained forwards come last"
        sigma = call[0][1].only.sigma
        assert all(torch.equal(times.only.sigma, sigma) for _, times, _, _ in call)
        assert all(condition is call[0][2] for _, _, condition, _ in call)
        assert torch.equal(call[0][0].only, call[2][0].only) and torch.equal(call[1][0].only, call[3][0].only)
        assert not torch.equal(call[0][0].only, call[1][0].only)
    assert not torch.equal(seen[0][1].only.sigma, seen[4][1].only.sigma), "another time draws another sigma"


def test_the_same_noise_reaches_both_arms(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_sd3_dir, tmp_path, "offline-dpo")
    batch = next(iter(trainer.dataloader))
    arguments: Any = trainer.training_args
    (arms,) = noised_arms(trainer.adapter, batch, arguments.time_sampling, seed=7, data_epoch=0)
    noises = {}
    for arm, noised in arms.items():
        sigma = noised.sigma.view(-1, 1, 1, 1)
        noises[arm] = (noised.state.only - (1 - sigma) * noised.clean.only) / sigma
        torch.testing.assert_close(noised.target.only, noises[arm] - noised.clean.only, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(noises["chosen"], noises["rejected"], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(arms["chosen"].clean.only, arms["rejected"].clean.only)
    assert not torch.allclose(noises["chosen"][0], noises["chosen"][1])


def test_draws_depend_on_the_example_and_the_epoch_alone(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_sd3_dir, tmp_path)
    sampling = TimeSampling("logit_normal", 3, (0.0, 0.99))

    def drawn(positions: list[int], epoch: int) -> list[torch.Tensor]:
        arms = noised_arms(trainer.adapter, trainer.dataloader.batch(positions), sampling, seed=7, data_epoch=epoch)
        return [torch.cat([a["target"].target.only.flatten(1), a["target"].sigma[:, None]], 1) for a in arms]

    together, alone, later = drawn([4, 1], 0), drawn([1], 0), drawn([1], 1)
    assert len(together) == 3
    for number in range(3):
        torch.testing.assert_close(together[number][1], alone[number][0], rtol=0, atol=1e-5)
        assert not torch.allclose(alone[number], later[number], atol=1e-2)
        assert not torch.allclose(together[number][0], together[number][1], atol=1e-2)


@pytest.mark.parametrize("key", KINDS)
def test_accumulation_layouts_give_one_gradient(tiny_sd3_dir: Path, tmp_path: Path, key: str) -> None:
    """Pitfall 21."""
    own = {"train__beta": 20.0} if key == "offline-dpo" else {}
    layouts = [
        gradients(
            trainer_for(
                tiny_sd3_dir, tmp_path, key, train__max_epochs=1, train__max_grad_norm=None,
                train__per_device_batch_size=rows, train__gradient_accumulation_steps=4 // rows,
                log__run_name=f"rows-{rows}", **own,
            )
        )[0]
        for rows in (1, 2, 4)
    ]  # fmt: skip
    for other in layouts[1:]:
        assert other.keys() == layouts[0].keys()
        for name, gradient in layouts[0].items():
            assert (gradient - other[name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("times", [1, 3])
def test_times_are_loss_terms_of_one_optimizer_step(tiny_sd3_dir: Path, tmp_path: Path, times: int) -> None:
    """Pitfall 10: `num_train_timesteps` does not change how many optimizer steps an epoch has."""
    trainer = trainer_for(
        tiny_sd3_dir, tmp_path, train__num_train_timesteps=times, train__lr_scheduler="linear", train__max_epochs=2
    )
    result = trainer.start()
    assert result.counts["optimizer_steps"] == 4
    rates = [row["default/learning_rate"] for row in metrics(tmp_path) if row["kind"] == "update"]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3]), "the schedule ends with the run"
    assert result.counts["trained_rows"] == 16 * times


@pytest.mark.parametrize("key", KINDS)
def test_bad_data_is_named_before_a_model_loads(
    tiny_sd3_dir: Path, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(self: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(SD3_5Adapter, "load_pipeline", loaded)
    make_dataset(tmp_path / "data", KINDS[key])
    (tmp_path / "data" / "images" / "2-0.png").unlink()
    with pytest.raises(InputError, match=rf"{tmp_path}/data/train\.jsonl:3: supervision.*'2-0\.png' is not a file"):
        trainer_for(tiny_sd3_dir, tmp_path, key)
    assert not (tmp_path / "save").exists()


def test_a_model_that_cannot_encode_outputs_is_named(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SD3_5Adapter, "encode_output_state", BaseAdapter.encode_output_state)
    with pytest.raises(InputError, match=r"model\.model_type: 'sd3-5' \(the test\) cannot encode its output media"):
        trainer_for(tiny_sd3_dir, tmp_path)
    assert not (tmp_path / "save").exists()


def test_the_reference_is_the_base_or_the_start(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """DPO after SFT: with `reference: start` the first loss is log 2 although the weights have left the base."""
    make_dataset(tmp_path / "sft")
    sft = offline_trainer(tiny_sd3_dir, tmp_path / "first", tmp_path / "sft", "sft", {"train.learning_rate": 1e-2})
    sft.start()
    assert sft.result.checkpoint is not None
    resume = {"model.resume_path": str(sft.result.checkpoint / "lora"), "train.max_steps": 1}
    data = make_dataset(tmp_path / "pairs", "preference")
    first_losses = {}
    for reference in ("base", "start"):
        changes = {**resume, "train.reference": reference, "log.run_name": reference}
        trainer = offline_trainer(tiny_sd3_dir, tmp_path / "second", data, "offline-dpo", changes)
        assert isinstance(trainer, OfflineDPOTrainer)
        first_losses[reference] = trainer.start().losses[0]
    assert first_losses["start"] == pytest.approx(math.log(2), abs=1e-9)
    assert abs(first_losses["base"] - math.log(2)) > 1e-4


def test_evaluation_generates_with_rewards_of_its_own_and_averaged_weights(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_for(
        tiny_sd3_dir, tmp_path, eval__eval_freq=1,
        eval_rewards=[{"name": "red", "reward_model": "tests.trainers.support.MeanRed"}], train__learning_rate=1e-2,
    )  # fmt: skip
    result = trainer.start()
    assert [row["cycle"] for row in result.evaluations] == [0.0, 1.0, 2.0]
    values = [row["default/red"] for row in result.evaluations]
    assert len(set(values)) == 3, "the pictures change with the weights"
    assert trainer.ema is not None and (tmp_path / "save/run/samples/default/before_after.png").exists()
    assert result.checkpoint is not None and (result.checkpoint / "lora_ema").is_dir()


def test_sft_then_rl_goes_on_from_the_tuned_weights(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """The recipe of guidance/datasets.md: RL starts from the LoRA, and its KL term is measured from there."""
    from flow_factory.hparams import load_config_from_mapping
    from flow_factory.trainers.build import build_trainer

    sft = trainer_for(tiny_sd3_dir, tmp_path / "one", train__learning_rate=1e-2)
    checkpoint = sft.start().checkpoint
    assert checkpoint is not None
    folder = tmp_path / "two"
    folder.mkdir()
    mapping = base_mapping(tiny_sd3_dir, folder)
    mapping["model"]["resume_path"] = str(checkpoint / "lora")
    mapping["train"] |= {"max_epochs": 1, "kl_beta": 0.1, "reference": "start", "kl_type": "v-based"}
    rl = build_trainer(load_config_from_mapping(mapping))
    tuned, started = weights(sft), weights(rl)
    assert tuned.keys() == started.keys()
    for name, value in tuned.items():
        torch.testing.assert_close(started[name], value, rtol=1e-5, atol=1e-7)
    rl.start()
    updates = [row for row in metrics(folder) if row["kind"] == "update"]
    assert updates[0]["default/kl"] == 0.0, "the reference is where RL starts"
    assert any(not torch.equal(started[name], value) for name, value in weights(rl).items())


def test_full_weights_are_trained_too(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", "preference")
    changes = {"model.finetune_type": "full", "train.max_epochs": 1, "train.learning_rate": 1e-4}
    trainer = offline_trainer(tiny_sd3_dir, tmp_path, data, "offline-dpo", changes)
    losses = trainer.start().losses
    assert losses[0] == pytest.approx(math.log(2), abs=1e-9) and losses[1] != losses[0]


def test_unknown_fields_of_other_trainers_are_named(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path)
    mapping = offline_mapping(tiny_sd3_dir, tmp_path, tmp_path)
    mapping["train"]["group_size"] = 4
    from flow_factory.hparams import load_config_from_mapping

    with pytest.raises(InputError, match=r"train\.group_size.*unknown key; it belongs to train\.trainer_type"):
        load_config_from_mapping(mapping)


def test_times_have_the_networks_own_unit(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_sd3_dir, tmp_path)
    arguments: Any = trainer.training_args
    (arms,) = noised_arms(
        trainer.adapter, next(iter(trainer.dataloader)), arguments.time_sampling, seed=7, data_epoch=0
    )
    step: StepTimes = arms["target"].times.only
    assert torch.equal(step.timestep, 1000 * step.sigma) and torch.equal(step.sigma, step.sigma_next)
    assert arms["target"].times.index is None

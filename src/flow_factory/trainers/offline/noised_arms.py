"""From a batch of stored examples to noised states: what losses on stored media train on.

Every draw is keyed by (run seed, purpose, data epoch, example, visit, number of the time), so it does not depend on
batches, ranks or history. The arms of an example (chosen and rejected) share their noise and their time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flow_factory.data_utils.offline_train_data import OfflineBatch, StoredMedia
from flow_factory.hparams.training_times import TimeSampling
from flow_factory.models.abc import BaseAdapter
from flow_factory.samples import LatentState, NoiseKey, Purpose
from flow_factory.scheduler.training_times import draw_sigmas
from flow_factory.trainers.noising import NoisedState, free_times, noised_clean


def noised_arms(
    adapter: BaseAdapter, batch: OfflineBatch, sampling: TimeSampling, *, seed: int, data_epoch: int
) -> Iterator[dict[str, NoisedState]]:
    """Every training time of a batch: each arm's media, encoded once, noised with the same noise to the same sigma.

    Args:
        adapter: Encodes the media and says what the network's time is.
        batch: The examples, with their condition as rollouts prepare it (`prepare_condition_state`).
        sampling: How times are drawn; `sampling.count` of them per example.
        seed: Run seed.
        data_epoch: Finished passes over the dataset.

    Yields:
        Arm name to its noised state, batch B.
    """
    keys = [NoiseKey(seed, data_epoch, entry.example.example_id, entry.repeat) for entry in batch.entries]
    initial = [key.generator(Purpose.INITIAL) for key in keys]
    rollout = adapter.prepare_latents(batch.condition, initial, *batch.entries[0].size)
    clean = {arm: _with_given(encode_media(adapter, media), rollout) for arm, media in batch.media.items()}
    drawn = [draw_sigmas(sampling, sampling.count, key.generator(Purpose.TRAIN_TIME)) for key in keys]
    sigmas = torch.stack(drawn, dim=1).to(adapter.device)  # [times, B]
    for number, sigma in enumerate(sigmas):
        noised = {}
        for arm, latents in clean.items():
            times = free_times(latents, sigma, adapter.timestep_for_sigma, adapter.component_sigma)
            # Fresh generators for each arm, so that both draw the same noise.
            generators = [key.generator(Purpose.TRAIN_NOISE, number) for key in keys]
            noised[arm] = noised_clean(latents, times, generators, number)
        yield noised


@torch.no_grad()
def encode_media(adapter: BaseAdapter, media: StoredMedia) -> LatentState:
    """Latents of stored media, float32 on the device: the mean of the encoder's distribution, so nothing is drawn."""
    return adapter.encode_output_state(media.unbind()).to(adapter.device, torch.float32)


def _with_given(media: LatentState, rollout: LatentState) -> LatentState:
    """The latents of media, with what a rollout's state has beside them: what is given and pinned, with its masks."""
    given = [name for name in rollout if name not in media.components]
    return LatentState(
        {**media.components, **{name: rollout[name] for name in given}},
        {**media.masks, **{name: rollout.masks[name] for name in given}},
    )

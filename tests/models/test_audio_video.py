"""What joint models share."""

from __future__ import annotations

import torch

from flow_factory.models.audio_video import shared_grid, with_sound
from flow_factory.samples import Grid


def test_each_row_has_its_frames_and_its_sound() -> None:
    frames = [torch.full((2, 3, 4, 4), i, dtype=torch.uint8) for i in range(2)]
    waveforms = torch.tensor([[[0.5, -3.0]], [[1.5, 0.25]]], dtype=torch.bfloat16, requires_grad=True)
    rows = with_sound(frames, waveforms, 24000)
    assert [int(row.frames[0, 0, 0, 0]) for row in rows] == [0, 1]
    assert [row.sound.waveform.tolist() for row in rows] == [[[0.5, -1.0]], [[1.0, 0.25]]]
    for row in rows:
        assert row.sound.sample_rate == 24000 and row.sound.waveform.dtype == torch.float32
        assert not row.sound.waveform.requires_grad
        assert row.sound.waveform.untyped_storage().nbytes() == 8  # a row alone, not the batch that it was cut from


def test_components_walk_one_grid() -> None:
    sigmas, timesteps = torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1000.0, 500.0])
    grid = shared_grid(Grid.single(sigmas, timesteps))
    assert list(grid.sigmas) == list(grid.timesteps) == ["video", "audio"] and grid.length == 2
    times = grid.times(1, 3)
    for name in ("video", "audio"):
        assert times[name].sigma.tolist() == [0.5] * 3 and times[name].timestep.tolist() == [500.0] * 3

"""CogView4: the network's time is not 1000 sigma, and depends on the picture's size."""

from __future__ import annotations

import pytest
import torch

from tests.models.benches import Open
from tests.models.support import generators


@pytest.mark.parametrize("size", [(32, 48), (64, 64)])
def test_freely_drawn_times_lie_on_the_grid_of_their_own_size(bench: Open, size: tuple[int, int]) -> None:
    """Stored pictures come in many sizes: their times are those that a picture of that size is drawn with."""
    adapter = bench("cogview4").fresh
    state = adapter.prepare_latents(None, generators([0]), *size)
    grid = adapter.sigma_grid(6, state, None)
    times = adapter.timestep_for_sigma(grid.primary[:-1], state)
    torch.testing.assert_close(times, grid.timesteps["latent"], rtol=1e-5, atol=1e-2)
    other = adapter.prepare_latents(None, generators([0]), 128, 128)
    assert not torch.allclose(times, adapter.timestep_for_sigma(grid.primary[:-1], other), rtol=1e-2)

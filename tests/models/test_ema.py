"""Averages of weights against their closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from flow_factory.models.ema import Ema, EmaSchedule
from flow_factory.models.snapshots import Snapshot
from tests.models.support import make_adapter


def build(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Snapshot]:
    weight = torch.zeros(3, dtype=dtype)
    snapshot = Snapshot("ema", "default", {"w": weight}, {"w": torch.zeros(3)})
    snapshot.copy_from_role()
    return weight, snapshot


def test_constant_decay_is_the_geometric_sum() -> None:
    weight, snapshot = build()
    ema = Ema(snapshot, EmaSchedule("constant", 0.9))
    for step in range(1, 21):
        weight.fill_(float(step))
        assert ema.step(step) == 0.9
    expected = sum(0.1 * 0.9 ** (20 - k) * k for k in range(1, 21))
    torch.testing.assert_close(snapshot.values["w"], torch.full((3,), expected), rtol=1e-6, atol=0)


def test_average_of_bf16_weights_is_kept_in_fp32() -> None:
    weight, snapshot = build(torch.bfloat16)
    weight.fill_(1.0)
    snapshot.update(0.999)
    torch.testing.assert_close(snapshot.values["w"], torch.full((3,), 0.001), rtol=1e-4, atol=0)


def test_decay_zero_copies_and_one_holds() -> None:
    weight, snapshot = build()
    weight.copy_(torch.tensor([0.1, 1e-20, 3.0]))
    snapshot.update(0.0)
    assert torch.equal(snapshot.values["w"], weight)
    weight.add_(1)
    snapshot.update(1.0)
    assert torch.equal(snapshot.values["w"], torch.tensor([0.1, 1e-20, 3.0]))


def test_interval_and_counter() -> None:
    weight, snapshot = build()
    weight.fill_(1.0)
    ema = Ema(snapshot, EmaSchedule("power", 0.999), interval=3)
    assert [ema.step(step) for step in range(1, 7)] == [None, None, 1 / 10, None, None, 2 / 11]
    other = Ema(snapshot, EmaSchedule("power", 0.999), interval=3)
    other.load_state_dict(ema.state_dict())
    assert other.step(9) == ema.step(9) == 3 / 12


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (EmaSchedule("constant", 0.9), {0: 0.9, 1000: 0.9}),
        (EmaSchedule("power", 0.9), {0: 0.1, 10: 11 / 20, 10_000: 0.9}),
        (EmaSchedule("linear", 0.8, ramp_updates=4), {0: 0.0, 1: 0.2, 4: 0.8, 9: 0.8}),
        (EmaSchedule("piecewise_linear", 0.8, 3, 4), {0: 0.0, 2: 0.0, 3: 0.0, 4: 0.2, 7: 0.8, 70: 0.8}),
        (EmaSchedule("cosine", 0.8, ramp_updates=4), {0: 0.0, 2: 0.4, 4: 0.8, 9: 0.8}),
        (EmaSchedule("warmup_cosine", 0.8, 3, 4), {2: 0.0, 3: 0.0, 4: 0.8 * (1 - math.cos(math.pi / 4)) / 2, 7: 0.8}),
    ],
)
def test_schedules(schedule: EmaSchedule, expected: dict[int, float]) -> None:
    for n, decay in expected.items():
        assert schedule(n) == pytest.approx(decay, abs=1e-12)
    decays = [schedule(n) for n in range(200)]
    assert decays == sorted(decays), "an average never forgets faster later"


def test_wrong_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="spline"):
        EmaSchedule("spline")
    with pytest.raises(ValueError, match="decay"):
        EmaSchedule(decay=1.5)
    with pytest.raises(ValueError, match="interval"):
        Ema(build()[1], EmaSchedule(), interval=0)


@pytest.mark.parametrize("finetune", ["lora", "full"])
def test_ema_of_an_adapter(tiny_sd3_dir: Path, finetune: str) -> None:
    adapter = make_adapter(tiny_sd3_dir, {"model.finetune_type": finetune}, prepare=False)
    snapshot = adapter.add_snapshot("ema")
    adapter.prepare()
    start = {n: p.detach().clone() for n, p in adapter.trainable_parameters().items()}
    with torch.no_grad():
        for parameter in adapter.trainable_parameters().values():
            parameter.add_(1.0)
    Ema(snapshot, EmaSchedule("constant", 0.75)).step(1)
    for name, value in snapshot.values.items():
        torch.testing.assert_close(value, start[name] + 0.25, rtol=0, atol=1e-6)

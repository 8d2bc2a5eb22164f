"""Every random draw of a run comes from a named CPU generator, so results depend on counters only.

The seed of a draw is a hash of (run seed, purpose, cycle, group id, member, step). It does not depend on the rank, on
the batch layout or on what was drawn before, so a run on two processes, or a resumed run, draws the same numbers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Purpose(str, Enum):
    """What a draw is for; draws for different purposes are independent."""

    INITIAL = "initial"
    SDE = "sde"
    TRAIN_NOISE = "train_noise"
    TRAIN_TIME = "train_time"
    SHUFFLE = "shuffle"
    WINDOW = "window"
    DATA = "data"
    GLOBAL = "global"
    DECODE = "decode"


def derive_seed(seed: int, purpose: Purpose, cycle: int = 0, group_id: int = 0, member: int = 0, step: int = 0) -> int:
    """A 63-bit seed from the identity of a draw.

    Args:
        seed: The run's seed (or the evaluation seed).
        purpose: What the draw is for.
        cycle: Rollout iteration or data epoch.
        group_id: 64-bit identity of the prompt's group.
        member: Index inside the group.
        step: Grid index, or the number of a repeated draw.
    """
    packed = struct.pack("<6q", *(signed64(v) for v in (seed, cycle, group_id, member, step, 0)))
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.value.encode()[:16]).digest()
    return int.from_bytes(digest, "little") >> 1


def make_generator(seed: int, purpose: Purpose, **identity: int) -> torch.Generator:
    """A fresh CPU generator for one draw; keyword arguments as in `derive_seed`."""
    return torch.Generator("cpu").manual_seed(derive_seed(seed, purpose, **identity))


@dataclass(frozen=True)
class NoiseKey:
    """Identity of one sample's randomness.

    Attributes:
        seed: Run or evaluation seed.
        cycle: Rollout iteration.
        group_id: 64-bit group identity.
        member: Index inside the group.
    """

    seed: int
    cycle: int
    group_id: int
    member: int

    def generator(self, purpose: Purpose, step: int = 0) -> torch.Generator:
        """A fresh CPU generator for this sample."""
        return make_generator(
            self.seed, purpose, cycle=self.cycle, group_id=self.group_id, member=self.member, step=step
        )


def draw_normal(shape: Sequence[int], generators: Sequence[torch.Generator]) -> Tensor:
    """Standard normal noise [B, *shape] in float32 on CPU, row i from `generators[i]` alone."""
    return torch.stack([torch.randn(tuple(shape), generator=g, dtype=torch.float32) for g in generators])


def signed64(value: int) -> int:
    """A 64-bit identity as the signed integer with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value

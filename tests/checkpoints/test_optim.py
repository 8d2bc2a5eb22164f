"""Optimizer state by name: exact continuation, checks that name what differs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flow_factory.checkpoints.optim import load_optimizer_state, optimizer_state
from flow_factory.checkpoints.tree import load_tree, save_tree
from flow_factory.errors import InputError

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
}


class Net(nn.Module):
    def __init__(self, dead: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype))
        self.b = nn.Parameter(torch.randn(2, 4, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(2, generator=generator).to(dtype))
        if dead:
            self.dead = nn.Parameter(torch.randn(3, 3, generator=generator).to(dtype))

    def forward(self, x):
        return x @ self.a.T.to(x.dtype) @ self.b.T.to(x.dtype) + self.bias.to(x.dtype)


def names_of(net: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in net.named_parameters()}


def train(net, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def round_trip(tmp_path, optimizer, names):
    save_tree(tmp_path, "optimizer", optimizer_state(optimizer, names))
    return load_tree(tmp_path, "optimizer")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_plus_two_steps_equal_four(tmp_path, kind):
    """Pitfall 22: moments and step counts come back, bit for bit."""
    straight = Net()
    optimizer = OPTIMIZERS[kind](list(straight.parameters()))
    train(straight, optimizer, 4)

    first = Net()
    optimizer = OPTIMIZERS[kind](list(first.parameters()))
    train(first, optimizer, 2)
    tree = round_trip(tmp_path, optimizer, names_of(first))
    weights = {name: value.detach().clone() for name, value in first.state_dict().items()}

    second = Net()
    second.load_state_dict(weights)
    optimizer = OPTIMIZERS[kind](list(second.parameters()))
    load_optimizer_state(optimizer, names_of(second), tree)
    train(second, optimizer, 2, start=2)
    for name, value in straight.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name

    third = Net()  # the test can fail: without the state the weights differ
    third.load_state_dict(weights)
    train(third, OPTIMIZERS[kind](list(third.parameters())), 2, start=2)
    assert not torch.equal(third.a, second.a)


def test_parameters_without_a_gradient_have_no_state_and_that_is_fine(tmp_path):
    """Pitfall 23: AdamW state of parameters that never got a gradient is absent, on save and after load."""
    net = Net(dead=True)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    tree = round_trip(tmp_path, optimizer, names_of(net))
    assert "dead" not in tree["state"] and "dead" in tree["groups"][0]["params"]

    other = Net(dead=True)
    resumed = torch.optim.AdamW(other.parameters())
    load_optimizer_state(resumed, names_of(other), tree)
    assert other.dead not in resumed.state and other.a in resumed.state

    # Loading over an optimizer that has gone further leaves exactly the saved state.
    fresh_tree = round_trip(tmp_path, torch.optim.AdamW(net.parameters()), names_of(net))
    load_optimizer_state(resumed, names_of(other), fresh_tree)
    assert not any(resumed.state.values())


def test_order_of_parameters_does_not_matter(tmp_path):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 2)
    tree = round_trip(tmp_path, optimizer, names_of(net))
    backwards = torch.optim.AdamW(list(net.parameters())[::-1])
    load_optimizer_state(backwards, names_of(net), tree)
    for parameter in net.parameters():
        assert torch.equal(backwards.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert backwards.state[parameter]["exp_avg"] is not tree["state"][names_of(net)[parameter]]["exp_avg"]


def test_options_of_groups_come_back(tmp_path):
    net = Net()
    optimizer = torch.optim.AdamW([{"params": [net.a], "lr": 0.3}, {"params": [net.b, net.bias], "betas": (0.5, 0.6)}])
    optimizer.param_groups[0]["lr"] = 0.1 + 0.2
    tree = round_trip(tmp_path, optimizer, names_of(net))
    other = torch.optim.AdamW([{"params": [net.a]}, {"params": [net.bias, net.b]}])
    load_optimizer_state(other, names_of(net), tree)
    assert other.param_groups[0]["lr"] == 0.1 + 0.2
    assert other.param_groups[1]["betas"] == (0.5, 0.6)


def test_state_keeps_its_dtype(tmp_path):
    """torch's own load_state_dict casts fp32 moments to the dtype of a bf16 parameter."""
    net = Net(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.state[net.a]["exp_avg"] = torch.full((4, 3), 1 / 3)
    tree = round_trip(tmp_path, optimizer, names_of(net))
    other = torch.optim.AdamW(net.parameters())
    load_optimizer_state(other, names_of(net), tree)
    assert other.state[net.a]["exp_avg"].dtype is torch.float32
    assert torch.equal(other.state[net.a]["exp_avg"], torch.full((4, 3), 1 / 3))


def test_differences_are_named_and_nothing_is_changed(tmp_path):
    net = Net(dead=True)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    tree = round_trip(tmp_path, optimizer, names_of(net))

    small = Net()
    target = torch.optim.AdamW(small.parameters(), lr=0.5)
    with pytest.raises(InputError, match="does not train: dead"):
        load_optimizer_state(target, names_of(small), tree)
    assert not target.state and target.param_groups[0]["lr"] == 0.5

    small_tree = round_trip(tmp_path, torch.optim.AdamW(small.parameters()), names_of(small))
    with pytest.raises(InputError, match="does not hold: dead"):
        load_optimizer_state(optimizer, names_of(net), small_tree)

    reshaped = Net(dead=True)
    reshaped.b = nn.Parameter(torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"b has shape \[2, 5\], saved \[2, 4\]"):
        load_optimizer_state(torch.optim.AdamW(reshaped.parameters()), names_of(reshaped), tree)

    with pytest.raises(InputError, match=r"AdamW.*SGD"):
        load_optimizer_state(torch.optim.SGD(net.parameters(), lr=1), names_of(net), tree)

    split = torch.optim.AdamW([{"params": [net.a]}, {"params": [net.b, net.bias, net.dead]}])
    with pytest.raises(InputError, match="2 parameter groups, saved 1"):
        load_optimizer_state(split, names_of(net), tree)

    with pytest.raises(KeyError, match=r"\(4, 3\)"):
        optimizer_state(optimizer, {})

"""Networks without numbers hold in memory what networks with them do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flow_factory.errors import InputError
from flow_factory.hparams import load_config
from flow_factory.models.registry import get_adapter_class
from flow_factory.models.shapes.kernels import Kernels
from flow_factory.models.shapes.live_bytes import LiveBytes
from flow_factory.models.shapes.runner import ShapeRuns
from flow_factory.models.shapes.skeleton import build_networks, build_skeleton, config_folder
from flow_factory.models.shapes.values import META, KnownValues
from flow_factory.samples import ConditionInputs
from flow_factory.trainers import setup
from flow_factory.trainers.planning.costs import Batch
from tests.models.saved_bytes import SavedBytes

CPU = torch.device("cpu")


# Bytes that are alive --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_live_bytes_by_hand(device: str) -> None:
    """Four layers of 256 x 256 with 64 rows: a ReLU's output each is held, its input is there for a moment."""
    layers = [nn.Linear(256, 256, device=device) for _ in range(4)]
    x = torch.empty(64, 256, device=device)
    rows, weights = 64 * 256 * 4, sum(p.numel() * 4 for layer in layers for p in layer.parameters())
    live = LiveBytes([x, *(p for layer in layers for p in layer.parameters())])
    with live:
        h = x
        for layer in layers:
            h = torch.relu(layer(h))
        assert (live.now, live.peak) == (4 * rows, 5 * rows)
        h.backward(torch.empty_like(h))
        del h
    assert live.now == weights, "the gradients"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_live_bytes_of_views_and_checkpoints(device: str) -> None:
    x = torch.empty(32, 64, device=device)
    layer = nn.Linear(64, 64, device=device)
    with LiveBytes([x, *layer.parameters()]) as live:
        view = x.view(64, 32).t()[1:]
        assert live.now == 0
        view.add_(1)
        assert live.now == 0

        def block(h: Tensor) -> Tensor:
            return layer(torch.relu(layer(h)).exp())

        h = checkpoint(block, x, use_reentrant=False)
        assert isinstance(h, Tensor) and live.now == 32 * 64 * 4, "the output alone: the inside is computed again"
        kept = live.now
        h = checkpoint(block, h, use_reentrant=False)
        assert live.now == 2 * kept


# Kernels ---------------------------------------------------------------------------------------------------------


def run(network: Callable[..., Tensor], inputs: list[Tensor], known: list[Tensor], dtype: torch.dtype | None) -> int:
    """Bytes held after a forward pass on the meta device."""
    moved = [x.detach().to("meta") for x in inputs]
    live = LiveBytes([*moved, *known])
    with META, Kernels(dtype), live:
        result = network(*moved)
        held = live.now
        result.sum().backward()
    return held


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("trained", [True, False])
def test_autocast_holds_what_the_real_one_does(dtype: torch.dtype | None, trained: bool) -> None:
    """Casts of inputs and of fp32 weights, and no copies of what has the dtype already."""
    real = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), nn.Linear(48, 16))
    real[2].requires_grad_(trained)
    x = torch.randn(40, 48)
    autocast = torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)
    with autocast, SavedBytes(real) as saved:
        output = real(x)
    expected = saved.total + output.untyped_storage().nbytes()
    if dtype is None:
        expected -= 40 * 48 * 4  # the input is saved, and is not counted
    shadow = nn.Sequential(*(nn.Linear(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in real))
    shadow = shadow.to("meta")
    shadow[2].requires_grad_(trained)
    assert run(shadow, [x], list(shadow.parameters()), dtype) == expected


def test_attention_is_fused() -> None:
    """Queries, keys, values, the output and a float32 per query; no [L, L] scores."""
    q, k, v = (torch.randn(2, 4, 128, 16, requires_grad=True) for _ in range(3))
    projections = [nn.Parameter(torch.empty(16, 16, device="meta")) for _ in range(3)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        moved = [x @ w for x, w in zip((q, k, v), projections, strict=True)]
        return F.scaled_dot_product_attention(*moved)

    tensor = 2 * 4 * 128 * 16 * 4
    assert run(attend, [q, k, v], list(projections), None) == 4 * tensor + 2 * 4 * 128 * 4


def test_attention_keeps_its_mask_as_numbers() -> None:
    """A boolean mask of [L, L] costs four bytes for each entry in float32, as autograd says."""
    q, k, v = (torch.randn(2, 4, 128, 16, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, 128, 128) > 0.1
    with SavedBytes(nn.Linear(1, 1)) as plain:
        F.scaled_dot_product_attention(q, k, v)
    with SavedBytes(nn.Linear(1, 1)) as masked:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def attend(q: Tensor, mask: Tensor | None = None) -> Tensor:
        x = q.requires_grad_()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    held = run(attend, [q, mask], [], None) - run(attend, [q], [], None)
    assert held == masked.total - plain.total == 2 * 128 * 128 * 4


UNKNOWN = (NotImplementedError, RuntimeError)


def test_values_that_networks_read() -> None:
    """Lengths off a mask, also through indexing, and what is made from numbers inside."""
    values = KnownValues()
    x = torch.empty(2, 4, 8, device="meta")
    mask = values.to_meta(torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]))
    repeats = values.to_meta(torch.tensor([2, 1, 3]))
    with META, values:
        assert mask.sum(dim=1).tolist() == [3, 1]
        assert int(mask.to(torch.bool).sum().item()) == 4 and bool((mask > 0).any())
        assert x[mask.bool()].shape == (4, 8)
        assert x[:, :3].repeat_interleave(repeats, dim=1).shape == (2, 6, 8)
        assert mask.bool().nonzero().shape == (4, 2)
        assert mask.to(x.device).max().item() == 1
        assert x[mask.bool().unsqueeze(-1).expand_as(x)].shape == (4 * 8,)
        positions = torch.arange(4).unsqueeze(0).expand(2, 4)
        assert positions.is_meta and (positions[:, -1] == 3).all()
        assert torch.full((3,), 2, dtype=torch.long).sum().item() == 6
        x[:, mask[0].bool()] = torch.zeros(2, 3, 8)
        with pytest.raises(UNKNOWN):
            x.sum().item()


def test_values_that_are_written_to() -> None:
    """In place, through views and masks; with something unknown there are none any more."""
    values = KnownValues()
    counts = values.to_meta(torch.tensor([1, 2, 3]))
    unknown = torch.empty(3, device="meta").long()
    with META, values:
        counts[0] = 7
        counts[1:].add_(1)
        counts[counts == 4] = torch.tensor([40])
        assert counts.tolist() == [7, 3, 40]
        mixed = counts + unknown
        counts.add_(unknown)
        for tensor in (mixed, counts):
            with pytest.raises(UNKNOWN):
                tensor.sum().item()


def test_unknown_numbers_equal_no_number() -> None:
    """A network may ask whether it was given zeros alone; of nothing, everything holds."""
    values = KnownValues()
    known = values.to_meta(torch.tensor([0, 0, 3]))
    with META, values:
        pictures = torch.empty(2, 1 << 25, device="meta")  # more than are kept of known values
        assert not torch.all(pictures == 0) and not (pictures[0] == 1.5).any()
        assert torch.all(pictures[:, :0] == 0)
        assert (known == 0).tolist() == [True, True, False]
        with pytest.raises(UNKNOWN):
            bool((pictures > 0).any())


# The embedded pipeline -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShapeRuns, Batch, Any, Any]:
    """Its skeleton, a training batch of eight rows, its times and guidance."""
    folder = tmp_path_factory.mktemp("embedded")
    config = load_config("examples/grpo/lora/sd3_5/tiny.yaml", [f"data.cache_dir={folder}", f"log.save_dir={folder}"])
    runs = ShapeRuns(build_skeleton(config))
    steps = setup.resolve_steps(config, runs.adapter)
    assert steps is not None
    inputs = [ConditionInputs("two red stars on a pink background", (64, 64))]
    condition = runs.encode(inputs, False, config.train_generation)
    batch = Batch(runs, [condition], 8, (64, 64), config.train_generation, steps.grid)
    return runs, batch, steps.grid.times(2, 8, CPU), runs.adapter.guidance(1.0)


@pytest.fixture(scope="module")
def real_adapter(embedded: tuple[ShapeRuns, Batch, Any, Any]) -> Any:
    adapter = get_adapter_class("sd3-5")(embedded[0].adapter.config)
    adapter.prepare()
    return adapter


def test_activations_of_the_embedded_pipeline(embedded: Any, real_adapter: Any) -> None:
    """Against what autograd saves: to a few percent, where 2 is promised."""
    runs, batch, times, guidance = embedded
    traced = runs.predict(batch.state, times, batch.condition, guidance, train=True)
    with SavedBytes(real_adapter.bundle) as saved:
        real_adapter.predict(batch.state, times, batch.condition, guidance)
    assert traced.held == pytest.approx(saved.total, rel=0.05)
    (blocks,) = traced.blocks
    assert (blocks.kind, blocks.count, blocks.rows, blocks.tokens, blocks.width) == (
        *("JointTransformerBlock", 5, 8),
        *(8 * 8, 128),
    )
    assert 0.8 < blocks.count * blocks.held / traced.held < 1


def test_activations_with_gradient_checkpointing(embedded: Any, real_adapter: Any) -> None:
    """Against the inputs of the real blocks, and what one block saves when it is computed again."""
    runs, batch, times, guidance = embedded
    traced = runs.predict(batch.state, times, batch.condition, guidance, train=True, checkpointing=True)
    module = real_adapter.bundle.component("transformer")
    inputs: dict[int, Tensor] = {}
    inside: list[int] = []

    def checkpointed(block: nn.Module, *args: Any) -> Any:
        inputs.update({x.untyped_storage().data_ptr(): x for x in args if isinstance(x, Tensor)})
        with SavedBytes(block) as saved:
            block(*args)
        inside.append(saved.total)
        return checkpoint(block.__call__, *args, use_reentrant=False)

    module.enable_gradient_checkpointing(checkpointed)
    try:
        with SavedBytes(real_adapter.bundle) as outside:
            real_adapter.predict(batch.state, times, batch.condition, guidance)
    finally:
        module.disable_gradient_checkpointing()
    waiting = sum(x.untyped_storage().nbytes() for x in inputs.values())
    assert len(inside) == 5
    # `outside` also sees what the blocks' own measurement saved, so it is no part of this.
    assert waiting * 0.8 < traced.held < waiting * 1.5 and outside.total > 0
    assert traced.peak == pytest.approx(traced.held + max(inside), rel=0.4)


def test_a_forward_without_gradients_holds_a_block(embedded: Any) -> None:
    runs, batch, times, guidance = embedded
    train = runs.predict(batch.state, times, batch.condition, guidance, train=True)
    sample = runs.predict(batch.state, times, batch.condition, guidance, train=False)
    assert sample.held < sample.peak < train.held / 5
    assert runs.decode(batch.state).peak > 8 * 3 * 64 * 64 * 4


def test_nothing_is_left_of_a_trace(embedded: Any) -> None:
    runs, batch, times, guidance = embedded
    runs.predict(batch.state, times, batch.condition, guidance, train=True, checkpointing=True)
    module = runs.adapter.bundle.component("transformer")
    assert not module.is_gradient_checkpointing
    assert all(p.grad is None and p.is_meta for p in runs.adapter.trainable_parameters().values())


# Wrong folders ---------------------------------------------------------------------------------------------------


def test_a_network_without_a_config(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_sd3_dir, tmp_path / "model")
    (tmp_path / "model" / "vae" / "config.json").unlink()
    with pytest.raises(InputError, match=r"vae/config.json is missing.*AutoencoderKL.*copy it"):
        build_networks(tmp_path / "model")
    (tmp_path / "model" / "vae" / "config.json").write_text('{"block_out_channels": "wide"}')
    with pytest.raises(InputError, match=r"vae/config.json does not describe a AutoencoderKL"):
        build_networks(tmp_path / "model")


def test_a_class_that_is_not_installed(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_sd3_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    index = tmp_path / "model" / "model_index.json"
    index.write_text(index.read_text().replace("SD3Transformer2DModel", "SD9Transformer2DModel"))
    with pytest.raises(InputError, match=r"'transformer' a diffusers.SD9Transformer2DModel.*install"):
        build_networks(tmp_path / "model")


def test_a_hub_snapshot_needs_no_weights(tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that holds the small files only, as the download of them leaves it."""
    repository = tmp_path / "models--org--tiny"
    shutil.copytree(tiny_sd3_dir, repository / "snapshots" / "abc", ignore=shutil.ignore_patterns("*.safetensors"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = config_folder("org/tiny")
    assert folder == repository / "snapshots" / "abc"
    assert set(build_networks(folder)) == {"transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"}
    with pytest.raises(InputError, match=r"the config files of 'org/other' could not be downloaded.*Give a folder"):
        config_folder("org/other")

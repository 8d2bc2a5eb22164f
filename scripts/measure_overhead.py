"""Overhead of a steady GRPO cycle over the bare network work that it cannot avoid.

A cycle (rollout, decoding, reward, advantage, replay, backward, optimizer, logging) alternates in one process with the
same transformer forwards, backwards and VAE decodes at the same batch sizes and thread count. Wall and CPU seconds are
both reported, as ratios of medians; start-up, evaluation and checkpoints are left out.

    python scripts/measure_overhead.py                       # the embedded pipeline, 12 cycles after 2 warm-ups
    python scripts/measure_overhead.py --cycles 20 --threads 1 train.num_inference_steps=10
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from flow_factory import build_trainer, load_config
from flow_factory.trainers.abc import BaseTrainer


def bare_cycle(trainer: BaseTrainer) -> Callable[[], None]:
    """A function that does the network work of one cycle of `trainer`, and nothing else."""
    plan, arguments = trainer.rollout_plan, trainer.training_args
    batches = list(trainer.dataloader)
    condition = batches[0].condition
    size = len(batches[0].records)
    adapter = trainer.adapter
    vae = adapter.pipeline.vae
    # The root that gradients must go through dispatches by name: that is part of the bare work too.
    transformer = adapter.network("transformer")
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    shape = (size, adapter.pipeline.transformer.config.in_channels, plan.height // factor, plan.width // factor)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    timestep = torch.full((size,), 500.0)
    inputs = {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": condition.prompt_embeds,
        "pooled_projections": condition.pooled_prompt_embeds,
        "return_dict": False,
    }
    if plan.guidance.needs_negative():
        raise SystemExit("measure without guidance: the bare loop does not double its batch (train.guidance_scale=1)")
    parameters = list(adapter.trainable_parameters().values())

    def run() -> None:
        with torch.no_grad():
            for _ in batches:
                for _ in range(plan.grid.length):
                    transformer(**inputs)
                vae.decode(latents, return_dict=False)
        for _ in range(arguments.num_inner_epochs):
            for _ in batches:
                for _ in plan.window:
                    transformer(**inputs)[0].mean().backward()
        for parameter in parameters:
            parameter.grad = None

    return run


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/grpo/lora/sd3_5/tiny.yaml")
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"log.save_dir={folder}",
            "log.save_freq=0",
            "eval.eval_freq=0",
            "train.max_epochs=100000",
            "log.verbose=false",
        ]
        trainer = build_trainer(load_config(arguments.config, [*fixed, *arguments.overrides]))
        bare = bare_cycle(trainer)
        rows = []
        for number in range(arguments.warmups + arguments.cycles):
            # The order alternates, so that a slow drift of a shared machine weighs on both alike.
            if number % 2:
                reference, cycle = timed(bare), timed(trainer._run_cycle)
            else:
                cycle, reference = timed(trainer._run_cycle), timed(bare)
            if number >= arguments.warmups:
                rows.append((*cycle, *reference))
                print(
                    f"cycle {cycle[0]:.3f} s wall, {cycle[1]:.3f} s CPU | bare {reference[0]:.3f}, {reference[1]:.3f}"
                )
        if trainer.reward_buffer is not None:
            trainer.reward_buffer.close()
        trainer.tracker.close()
    wall, cpu, bare_wall, bare_cpu = (statistics.median(column) for column in zip(*rows, strict=True))
    report = {
        "machine": f"{platform.machine()}, {arguments.threads} thread(s), torch {torch.__version__}",
        "cycles": len(rows),
        "cycle_s": round(wall, 4),
        "bare_s": round(bare_wall, 4),
        "wall_ratio": round(wall / bare_wall, 4),
        "cpu_ratio": round(cpu / bare_cpu, 4),
        "median_of_paired_wall_ratios": round(statistics.median(r[0] / r[2] for r in rows), 4),
        "median_of_paired_cpu_ratios": round(statistics.median(r[1] / r[3] for r in rows), 4),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

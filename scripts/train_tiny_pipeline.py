"""Make the embedded text-to-image pipeline (`assets/tiny-sd3-shapes`) from nothing, on a CPU.

    python scripts/train_tiny_pipeline.py --work-dir work --output tiny-sd3-shapes

Draws captioned pictures of the shapes world, trains an AutoencoderKL, then two CLIP text encoders and an SD3
transformer by flow matching, and saves a StableDiffusion3Pipeline folder of their averaged weights. Every stage leaves
its result in the work folder and is skipped when that is there; the long one continues from its last snapshot exactly
as if it had not been interrupted. A seed and a number of threads determine the result on one kind of machine.

`--steps` may be changed between interruptions in the constant phase: the learning rate depends on it only in the last
`--decay-steps`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from tiny_pipeline.autoencoder import train_autoencoder
from tiny_pipeline.flow import FlowConfig, FlowTrainer, build_pool, train_flow
from tiny_pipeline.parts import build_parts, save_pipeline


def parse_arguments() -> argparse.Namespace:
    defaults = FlowConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="snapshots, latents and the log")
    parser.add_argument("--output", type=Path, required=True, help="pipeline folder, rewritten at every snapshot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--autoencoder-steps", type=int, default=2600, help="of 16 pictures")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="flow-matching steps in all")
    parser.add_argument("--decay-steps", type=int, default=defaults.decay_steps, help="last steps, with a falling rate")
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--pool-size", type=int, default=defaults.pool_size, help="captioned pictures to train on")
    parser.add_argument("--snapshot-every", type=int, default=500, help="steps between snapshots")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the transformer: a minute, then 20 %% faster"
    )
    parser.add_argument("--shift", type=float, default=3.0, help="time shift of the scheduler that is saved")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    log_path = arguments.work_dir / "log.txt"

    def log(line: str) -> None:
        with log_path.open("a") as stream:
            print(time.strftime("%H:%M:%S"), line, file=stream)
        print(line, flush=True)

    config = replace(
        FlowConfig(),
        steps=arguments.steps,
        decay_steps=arguments.decay_steps,
        batch_size=arguments.batch_size,
        pool_size=arguments.pool_size,
        seed=arguments.seed,
    )
    vae = train_autoencoder(arguments.work_dir / "vae", arguments.autoencoder_steps, 16, 2e-3, arguments.seed, log)
    vae.requires_grad_(False)
    pool = build_pool(vae, config, arguments.work_dir / "pool.pt", log)
    trainer = FlowTrainer(build_parts(arguments.seed), config)
    snapshot = arguments.work_dir / "flow.pt"
    if snapshot.exists():
        trainer.restore(snapshot)
        log(f"flow: continuing at step {trainer.step}")

    if arguments.compile:
        trainer.parts.transformer.compile()

    def on_snapshot(trainer: FlowTrainer) -> None:
        save_pipeline(trainer.averaged_parts(), vae, arguments.output, arguments.shift)
        log(f"flow: saved {arguments.output} at step {trainer.step}")

    config_line = ", ".join(f"{key} {value}" for key, value in vars(config).items())
    log(f"flow: {config_line}")
    train_flow(trainer, pool, snapshot, arguments.snapshot_every, on_snapshot, log)
    if not arguments.output.exists():
        on_snapshot(trainer)


if __name__ == "__main__":
    main()

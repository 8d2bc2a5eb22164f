"""Every adapter against the diffusers pipeline it wraps: one set of checks, one case per model.

To add a model, write `cases/<key>.py` with a function that builds a tiny random pipeline offline and a list `CASES`:

    CASES = [
        Case(
            key="flux1",                                  # model.model_type
            build=build_tiny_flux,                        # () -> pipeline; a few 10k to 500k parameters
            settings=(
                Setting("plain", 2.0, {}, {"guidance_scale": 2.0}),
                Setting("cfg", 2.0, {"true_cfg_scale": 3.0}, {"guidance_scale": 2.0, "true_cfg_scale": 3.0}),
            ),
            generation={"max_sequence_length": 10},       # model-specific fields of `train:` and `eval:`
            call={"max_sequence_length": 10},             # what they are to `pipeline(...)`
            wrapped=..., ...
        )
    ]

A `Setting` says the same twice: what the configuration holds, and what `pipeline(...)` is called with. Then

    python -m pytest tests/parity -k flux1
    python -m tests.parity.write_lora_keys flux1          # commits the names of exported weights to `lora_keys/`

runs all of these, with nothing else written for the model:

* `test_sampling.py`: the grid bit for bit for 1, 4 and 10 steps; `solver: pipeline` and ODE steps give the pipeline's
  latents (1e-5) and pictures, for every setting and scheduler of the case; each row of a batch is the pipeline's own
  single call; each input, perturbed, changes the result.
* `test_training.py`: the first ratio is exactly 1 for each SDE dynamics; gradients reach every LoRA layer; dead
  modules are dead, and nothing in an attention or MLP block is forgotten; a cycle of each trainer.
* `test_weights.py`: exported LoRA in plain diffusers, names of its weights, full weights saved and loaded, media
  encoded and decoded, conditions through the cache.

The reference is always `pipeline(...)` itself, loaded from the same folder. `bench.py` holds the adapters and results
of one case and keeps them for the session; pytest runs the tests case by case, so one case is in memory at a time.
"""

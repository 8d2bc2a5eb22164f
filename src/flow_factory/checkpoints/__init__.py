"""Checkpoints: atomic folders of safetensors and JSON with a manifest of hashes, and the signals that ask for one.

Submodules import on their own; `manifest`, `values`, `atomic` and `signals` need no torch, so the run folder can be
inspected before anything heavy loads.
"""

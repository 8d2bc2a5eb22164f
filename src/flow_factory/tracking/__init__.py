"""What a run shows and leaves behind: its folder, metrics as JSON lines, experiment trackers, pictures, progress lines.

Submodules import on their own; `backends`, `run_folder` and `metrics` need no torch.
"""

"""The one training loop, its drivers, and one small file per algorithm."""

"""Training on finite datasets."""

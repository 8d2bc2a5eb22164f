"""LTX-2: videos with their sound."""

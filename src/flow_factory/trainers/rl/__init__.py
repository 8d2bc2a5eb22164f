"""Online reinforcement learning."""

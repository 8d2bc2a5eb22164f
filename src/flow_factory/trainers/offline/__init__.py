"""Trainers on stored examples: a finite dataset instead of rollouts."""

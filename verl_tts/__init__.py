"""Reinforcement learning for codec text-to-speech models, as a plugin for verl and Ray."""

__version__ = "0.1.0"

"""Runs of commands: stages and pipelines of them, sharding, endpoints, Weights & Biases, the style of figures."""

"""Costs under load: measured here or modelled from peak figures, and a queue that is simulated at these costs."""

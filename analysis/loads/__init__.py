"""Costs under load: measured here or modelled from peak figures, and a simulated queue that is served at these costs."""

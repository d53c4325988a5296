"""Costs under load: measured here, modelled from peak figures, and what a served queue makes of them."""

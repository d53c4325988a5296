"""Figures, drawn from saved tables only."""

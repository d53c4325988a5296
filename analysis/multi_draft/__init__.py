"""Acceptance of several candidates per node, along given texts."""

"""Calibration: scores of predicted probabilities (`scores`, needs torchmetrics), and maps that correct them by depth (`by_depth`)."""

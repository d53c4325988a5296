"""Calibration: scores of predicted probabilities (`scores`), and maps that correct them by depth (`by_depth`).

Scores need torchmetrics, maps torch alone, for they work while decoding.
"""

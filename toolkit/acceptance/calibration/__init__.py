"""Calibration: scores of predicted probabilities (`scores`), maps that correct them (`maps`, `stored`), and their fit
(`fit`).

`maps` and `stored` need torch alone, for they work while decoding; `scores` needs torchmetrics, `fit` scikit-learn.
"""

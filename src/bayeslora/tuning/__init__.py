"""Constrained Bayesian optimisation of settings: several objectives, all to be small, and constraints ``c(x) ≤ 0``."""

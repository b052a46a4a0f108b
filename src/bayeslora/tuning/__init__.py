"""Constrained Bayesian optimisation of settings: several objectives to minimise, and constraints ``c(x) ≤ 0``."""

"""Probabilities over the options of questions."""

"""Probabilities of the tokens of running text and of solutions."""

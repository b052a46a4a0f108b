"""Runs: their settings, the layout of their directories, and the use of finished runs.

Training is in ``bayeslora.train``, which builds on this package.
"""

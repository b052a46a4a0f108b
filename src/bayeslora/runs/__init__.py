"""Runs: their settings, what lies where in their directories, and what can be done with one that is finished.

Nothing here trains; ``bayeslora.train`` does, and stands on this.
"""

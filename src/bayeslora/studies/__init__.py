"""Studies: several runs and what they show together."""

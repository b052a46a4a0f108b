"""Studies: several runs and their joint evaluation."""

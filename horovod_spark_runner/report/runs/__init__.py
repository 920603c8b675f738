"""The report of a run directory."""

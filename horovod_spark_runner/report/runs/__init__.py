"""What a run directory tells, and the report of it."""

"""Progress and records of a run for people: console, event files, MLflow, its report."""

"""Progress and records of a run for people: console, notebooks, event files, MLflow, its report."""

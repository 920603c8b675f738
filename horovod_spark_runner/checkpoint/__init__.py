"""Save and resume a run: run directory, checkpoints, states, and changes of configuration."""

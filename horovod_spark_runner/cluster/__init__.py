"""From a function to a result per rank, one folder for each kind of process."""

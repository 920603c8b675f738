"""Training on a rank, for any framework, and its interface to the driver."""

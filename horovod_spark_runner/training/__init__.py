"""A training on a rank, whatever the framework, and its interface to the driver."""

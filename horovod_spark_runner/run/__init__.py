"""A training on the driver: request, attempts, evaluation."""

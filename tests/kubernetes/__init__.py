"""Trainings on Kubernetes' own API server."""

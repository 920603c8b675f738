"""Trainings on a YARN of Hadoop's own servers."""

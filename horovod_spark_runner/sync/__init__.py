"""Synchronisation strategies, by which the ranks of a training train one model."""

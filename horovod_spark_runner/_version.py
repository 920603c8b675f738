"""The version of the package; read by setup.cfg without importing anything else."""

__version__ = "0.1.0"

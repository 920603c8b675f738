"""The driver's part of a launch."""

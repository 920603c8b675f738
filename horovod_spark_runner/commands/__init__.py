"""The console program: a module for each of its commands."""

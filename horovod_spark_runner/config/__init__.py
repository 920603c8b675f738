"""All settings: one table, the fields of frozen dataclasses."""

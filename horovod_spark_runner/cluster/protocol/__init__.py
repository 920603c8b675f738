"""The protocol between driver, slots and workers: values, messages, channels."""

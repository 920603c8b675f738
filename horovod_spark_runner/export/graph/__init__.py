"""Exported pipelines as one ONNX graph."""

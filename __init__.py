"""A gradient scaler that cannot let ranks disagree, and the harness that proves it."""

__version__ = "0.1.0"
__all__ = ["__version__"]

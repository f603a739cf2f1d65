"""Run functions on N ranks that cannot hang, hide a fault or outlive their parent."""

import lazy_loader

# The pytest plugin lives in this package and is loaded in every session of its
# environment. Importing all that ``__init__.pyi`` names takes 50 ms: each when used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

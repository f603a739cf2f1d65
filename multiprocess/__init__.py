"""Run functions on N ranks that cannot hang, hide a fault or outlive their parent."""

import lazy_loader

# The pytest plugin lives in this package and is loaded in every session of its
# environment. Importing all names of ``__init__.pyi`` takes 50 ms, so each is imported
# when it is used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""The methods under comparison: the posterior of each, and how it is trained."""

from bayeslora.methods.base import Method, Preset
from bayeslora.methods.registry import METHODS, find_method, find_preset

__all__ = ["METHODS", "Method", "Preset", "find_method", "find_preset"]

"""The methods that are compared: for each which posterior it uses and how that is trained."""

from bayeslora.methods.base import Method, Preset
from bayeslora.methods.registry import METHODS, find_method, find_preset

__all__ = ["METHODS", "Method", "Preset", "find_method", "find_preset"]

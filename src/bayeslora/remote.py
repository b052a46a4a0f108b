"""Runs behind an endpoint, by their public name: ``bayeslora.remote.RemoteModel``."""

from bayeslora.serving.remote import RemoteModel

__all__ = ["RemoteModel"]

"""The libraries that a server needs, of the extra ``serve``."""

from __future__ import annotations

import importlib.util

from bayeslora.errors import InputError


def require_libraries() -> None:
    """Refuse to serve without them."""
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client")):
        raise InputError(
            "serving needs fastapi, uvicorn and prometheus-client; run: pip install 'fastapi>=0.132' uvicorn "
            "prometheus-client"
        )

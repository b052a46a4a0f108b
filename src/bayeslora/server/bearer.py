"""The bearer token that requests must send."""

from __future__ import annotations

import os
from pathlib import Path

from bayeslora.errors import InputError

TOKEN_VARIABLE = "BAYESLORA_TOKEN"


def read_token(file: Path | None) -> str | None:
    """The bearer token from the file, if given, or from the environment; ``None`` if there is none."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: the token cannot be read ({error}); give a text file with the token") from error
    if not token:
        raise InputError(f"{file}: is empty; write a token to it, or omit --token-file")
    return token

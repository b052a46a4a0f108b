"""``python -m bayeslora.lm_eval`` is ``lm_eval`` with the model ``bayeslora``: the harness itself loads no plug-ins."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from bayeslora.errors import InputError


def main() -> None:
    """Run the harness; user errors are one line on stderr with exit code 2, as for the command ``bayeslora``."""
    try:
        _evaluate()
    except InputError as error:
        _exit(error, 2)
    except ArithmeticError as error:
        _exit(error, 1)


def _evaluate() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("lm-evaluation-harness is not installed; run: pip install 'lm-eval<0.5'")
    importlib.import_module("bayeslora.lm_eval.model")  # registers the model
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


def _exit(error: Exception, code: int) -> None:
    print(f"bayeslora: {' '.join(str(error).splitlines())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

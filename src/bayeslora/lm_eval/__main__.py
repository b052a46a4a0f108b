"""``python -m bayeslora.lm_eval`` is ``lm_eval`` with the model ``bayeslora``: the harness itself loads no plug-ins."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from bayeslora.errors import InputError, first_line
from bayeslora.hub_access import hub_or_cache


def main() -> None:
    """Run the harness; user errors are one line on stderr with exit code 2, as for the command ``bayeslora``."""
    try:
        _evaluate()
    except InputError as error:
        _exit(error, 2)
    except BrokenPipeError:
        raise
    except ConnectionError as error:  # of the library that loads the harness's data
        _exit(f"{first_line(error)}; check the network, or choose tasks whose data are in the local cache", 2)
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        _exit(f"{first_line(error)}; python -m bayeslora.lm_eval ls tasks lists them", 2)
    except ArithmeticError as error:
        _exit(error, 1)


def _evaluate() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("lm-evaluation-harness is not installed; run: pip install 'lm-eval<0.5'")
    importlib.import_module("bayeslora.lm_eval.model")  # registers the model
    from lm_eval.__main__ import cli_evaluate

    with hub_or_cache():
        cli_evaluate()


def _exit(error: object, code: int) -> None:
    print(f"bayeslora: {' '.join(str(error).splitlines())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""The model ``bayeslora`` for lm-evaluation-harness: scores and generations are averaged over draws of the weights.

``python -m bayeslora.lm_eval`` is the harness's own command line with this model in it. In Python, importing
:class:`BayesLoraLM` registers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayeslora._lazy import lazy_attributes

if TYPE_CHECKING:
    from bayeslora.lm_eval.model import BayesLoraLM

__all__ = ["BayesLoraLM"]

__getattr__ = lazy_attributes(__name__, {"BayesLoraLM": "bayeslora.lm_eval.model"})

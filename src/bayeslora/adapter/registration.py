"""Registers our method with PEFT.

PEFT looks up methods in the enumeration ``PeftType`` and has no extension point for other packages, so the member is added
by hand. The name determines the prefix of our parameters (``bayeslora_``) in PEFT and in transformers.
"""

from __future__ import annotations

from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import PeftType, register_peft_method

NAME = "bayeslora"


def extend_peft_type(name: str) -> PeftType:
    """Add a member to ``PeftType``, with everything a member defined in its class body has."""
    if name in PeftType.__members__:
        return PeftType[name]
    member = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member._sort_order_ = len(PeftType._member_names_)
    member.__objclass__ = PeftType
    type.__setattr__(PeftType, name, member)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    return member


def register() -> None:
    """Register the adapter with PEFT; doing so twice is harmless."""
    peft_type = extend_peft_type(NAME.upper())
    from bayeslora.adapter.config import BayesLoraConfig
    from bayeslora.adapter.model import BayesLoraModel

    known = PEFT_TYPE_TO_TUNER_MAPPING.get(peft_type)
    if known is BayesLoraModel:
        return
    if known is not None:
        raise ImportError(
            f"the installed PEFT has a method {NAME!r} of its own ({known.__module__}); they cannot coexist"
        )
    register_peft_method(name=NAME, config_cls=BayesLoraConfig, model_cls=BayesLoraModel)
    PeftModel.posterior_scale = property(_get_scale, _set_scale)


def _get_scale(model: PeftModel) -> float:
    return model.base_model.posterior_scale


def _set_scale(model: PeftModel, value: float) -> None:
    """Set the scale on the tuner: a ``PeftModel`` forwards *reading* an unknown attribute, but would keep one that is set."""
    if not hasattr(type(model.base_model), "posterior_scale"):
        raise AttributeError("posterior_scale belongs to models with a bayeslora adapter")
    model.base_model.posterior_scale = value

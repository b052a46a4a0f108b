"""The PEFT method ``bayeslora``: one tuner for all posteriors. Importing this registers it with PEFT."""

from bayeslora.adapter import registration

registration.register()

from bayeslora.adapter.config import BayesLoraConfig  # noqa: E402
from bayeslora.adapter.holder import PosteriorHolder, find_holder  # noqa: E402
from bayeslora.adapter.model import BayesLoraModel  # noqa: E402

__all__ = ["BayesLoraConfig", "BayesLoraModel", "PosteriorHolder", "find_holder"]

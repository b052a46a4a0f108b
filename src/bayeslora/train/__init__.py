"""Training: a mixin that turns transformers' ``Trainer`` (or TRL's) into one that maximises the ELBO."""

from bayeslora.train.trainer import BayesLoraTrainer, BayesLoraTrainerMixin

__all__ = ["BayesLoraTrainer", "BayesLoraTrainerMixin"]

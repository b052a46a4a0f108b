"""Build predictors from the settings of a run, and load its base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayeslora.adapter.sampling import Sampling
from bayeslora.models import LoadedModel, load_model
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.tokens.predictor import TokenPredictor
from bayeslora.predict.trunk import TrunkCache, TrunkScorer
from bayeslora.runs.config import RunConfig

if TYPE_CHECKING:
    from peft import PeftModel


def load_base(config: RunConfig, device: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load the base model of a run. Remote code runs only if the caller allows it, whatever the run's files say."""
    loading = config.loading
    return load_model(
        config.model,
        dtype=loading.dtype,
        device=device,
        bits=loading.bits,
        revision=loading.revision,
        trust_remote_code=trust_remote_code,
    )


def sampling_of(config: RunConfig) -> Sampling:
    """Draws for predictions, from the settings."""
    return Sampling(config.prediction.samples, config.seed, config.prediction.draw_layers)


def make_scorer(model: PeftModel, loaded: LoadedModel, config: RunConfig, trunk: TrunkCache | None) -> Scorer:
    """Make a scorer for the adapted model, with a cached trunk if the settings say so."""
    pad_id = loaded.tokenizer.pad_token_id
    return TrunkScorer(model, pad_id, trunk) if config.training.cache_trunk else Scorer(model, pad_id)


def make_predictor(scorer: Scorer, loaded: LoadedModel, config: RunConfig) -> Predictor:
    """Make a predictor of questions from the settings."""
    return Predictor(
        scorer,
        loaded.tokenizer,
        scoring=config.data.scoring,
        max_tokens=config.data.max_tokens,
        sampling=sampling_of(config),
        batch_tokens=config.prediction.batch_tokens,
    )


def make_token_predictor(model: PeftModel, loaded: LoadedModel, config: RunConfig) -> TokenPredictor:
    """Make a predictor of tokens from the settings."""
    return TokenPredictor(
        model,
        loaded.tokenizer.pad_token_id,
        sampling=sampling_of(config),
        batch_tokens=config.prediction.batch_tokens,
    )

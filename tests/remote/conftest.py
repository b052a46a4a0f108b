from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bayeslora import load_model
from bayeslora.export import export_run
from bayeslora.predict.calibrate import Calibration
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.trained import TrainedModel
from bayeslora.train import resolve
from bayeslora.train.run import adapt
from remote.server import Completions
from train import tiny

SAMPLES = 3


def random_run(method: str = "bayesian-lora", samples: int = SAMPLES, **changes: Any) -> TrainedModel:
    """A run as if it had been trained: all of the posterior is random, and its draws differ."""
    config = resolve(tiny.run_config(method, seed=7, **changes))
    loaded = load_model(config.model, device="cpu")
    model = adapt(loaded, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "posterior" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return TrainedModel(
        directory=RunDirectory(Path("nowhere")),
        config=config,
        loaded=loaded,
        model=model,
        samples=samples,
        draw_layers="all",
        calibration=Calibration(),
    )


@pytest.fixture(scope="session")
def trained() -> TrainedModel:
    """A calibrated run; not to be changed."""
    model = random_run()
    model.calibration = Calibration(temperature=1.7, posterior_scale=2.0, threshold=0.4, conformal={"0.9": 0.6})
    model.model.base_model.posterior_scale = 2.0
    return model


@pytest.fixture(scope="session")
def export(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run exported; not to be changed."""
    return export_run(trained, SAMPLES, tmp_path_factory.mktemp("export") / "adapters")


@pytest.fixture(scope="session")
def stock(export: Path) -> Completions:
    """The export as a server of stock PEFT sees it."""
    return Completions(tiny.model_directory(), export)


@pytest.fixture
def completions(stock: Completions) -> Completions:
    """The same without any trouble or memory."""
    stock.trouble = None
    stock.knows_tokens = True
    stock.asked.clear()
    stock.headers.clear()
    return stock

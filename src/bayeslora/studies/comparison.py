"""Settings of a comparison. Imports are light, because the command line is built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from bayeslora.errors import InputError
from bayeslora.number_checks import check_count, check_number
from bayeslora.runs.config import Pairs, RunConfig, resolve
from bayeslora.studies.study import Study, require_distinct, require_distinct_tasks


@dataclass(frozen=True)
class Trial:
    """Searched training settings of a method.

    Attributes:
        factor: factor of its learning rate.
        epochs: number of epochs; ``None`` for its own.
    """

    factor: float = 1.0
    epochs: int | None = None

    @property
    def label(self) -> str:
        """Label in records."""
        return f"{self.factor:g}" if self.epochs is None else f"{self.factor:g}, epochs {self.epochs}"

    def __str__(self) -> str:
        return f"×{self.label}"


OWN = Trial()
"""The method's own settings."""


def read_trial(text: str) -> Trial:
    """The trial written as ``FACTOR`` or ``FACTOR:EPOCHS``."""
    factor, _, epochs = text.partition(":")
    try:
        trial = Trial(float(factor), int(epochs) if epochs else None)
    except ValueError:
        raise InputError(f"trial {text!r} is not FACTOR or FACTOR:EPOCHS, such as 0.5:2") from None
    check_number("trials", trial.factor, above=0)
    if trial.epochs is not None:
        check_count("trials", trial.epochs)
    return trial


@dataclass(frozen=True, kw_only=True)
class Comparison(Study):
    """Methods compared on tasks, everything else being equal."""

    methods: tuple[str, ...] = ("all",)
    """Methods to compare (see bayeslora methods), or all."""
    tasks: tuple[str, ...]
    """Tasks to compare them on, by name or by the path of your own questions or text."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs; the table shows mean and standard deviation over them."""
    preset: str = "default"
    """The methods' settings: default is recommended, paper is as published."""
    rate_factors: tuple[float, ...] = (1.0,)
    """Factors of each method's learning rate; of several, the one with the least validation NLL is used for each task and
    method."""
    search_epochs: tuple[int, ...] = ()
    """Numbers of epochs to try with each of these factors, each with its own schedule; by default only the method's own
    number."""
    search_seeds: tuple[int, ...] = (0, 1)
    """Seeds of the search; their mean decides. Its runs never read the test split."""
    rates_beyond: int = 0
    """If the best factor is the smallest or the largest, extend the search beyond it by at most this many steps."""
    trials: Annotated[Mapping[str, str], Pairs] = field(default_factory=dict)
    """Methods that were searched before, with a factor of the learning rate and a number of epochs, such as lora=1:1
    swag=0.5:2. They are not searched again."""

    def __post_init__(self) -> None:
        for name in ("methods", "tasks", "seeds", "rate_factors", "search_seeds", "search_epochs"):
            values = getattr(self, name)
            if not values and name != "search_epochs":
                raise InputError(f"{name} is empty; give at least one")
            require_distinct(name, values)
        for epochs in self.search_epochs:
            check_count("search_epochs", epochs)
        for factor in self.rate_factors:
            check_number("rate_factors", factor, above=0)
        if self.rates_beyond < 0 or (self.rates_beyond and len(self.rate_factors) < 2):
            raise InputError(
                f"rates_beyond is {self.rates_beyond} with {len(self.rate_factors)} rate_factors; give at least 0, and at least "
                "two factors to go beyond"
            )
        self._check_trials()
        require_distinct_tasks(self.shift)
        require_distinct_tasks(tuple(dict.fromkeys((*self.tasks, *self.shift))))
        if self.adapter.settings and (len(self.methods) > 1 or self.methods == ("all",)):
            raise InputError("settings belong to one posterior, but there are several methods; leave them out")

    def _check_trials(self) -> None:
        for method, trial in self.trials.items():
            _require_trained(method)
            if method not in (*self.methods, "lora") and self.methods != ("all",):
                raise InputError(f"trials has {method!r}, which is none of the methods: {', '.join(self.methods)}")
            read_trial(str(trial))

    @property
    def method_names(self) -> tuple[str, ...]:
        """The methods by name. ``all`` are those that apply to every task."""
        from bayeslora.methods import METHODS
        from bayeslora.tasks import Task, find_task

        if self.methods != ("all",):
            return self.methods
        options = all(isinstance(find_task(task, how=self.data.own_format()), Task) for task in self.tasks)
        return tuple(name for name, method in METHODS.items() if options or not method.needs_options)

    def config(self, task: str, method: str, seed: int, trial: Trial = OWN) -> RunConfig:
        """One of the resolved runs, with the settings of the trial."""
        config = resolve(self.run(task, method, seed, self.preset))
        rate, epochs = config.training.learning_rate, trial.epochs or config.training.epochs
        assert rate is not None
        return replace(config, training=replace(config.training, learning_rate=rate * trial.factor, epochs=epochs))


def _require_trained(method: str) -> None:
    """Refuse a method without a learning rate to choose."""
    from bayeslora.methods import find_method

    if find_method(method).fit_post_hoc is not None:
        raise InputError(f"trials has {method!r}, which has no learning rate of its own; leave it out")

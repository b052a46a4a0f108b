"""LLLA: a Laplace approximation of the last adapted layer only (methods entry 9)."""

from dataclasses import replace

from bayeslora.methods import laplace

METHOD = replace(
    laplace.METHOD,
    name="laplace-last-layer",
    description="the same for the last adapted layer only",
    presets={name: replace(preset, settings={"scope": "last"}) for name, preset in laplace.METHOD.presets.items()},
)

"""Run by several processes at once: training steps whose gradients the main one writes to a file.

python -m torch.distributed.run --nproc_per_node 2 -m train.together OUT [fsdp]
"""

import sys

from safetensors.torch import save_file

from adapter.cases import adapted
from bayeslora import find_holder
from bayeslora.train.processes import Processes
from train.test_fit import COUNT, UNCLIPPED, gradients, make_fit

CASES = {
    "inducing": {},
    "inducing in parts": {"micro_batch": 4},
    "inducing aimed": {"aim": 1},
    "point": {"label_smoothing": 0.1},
    "adalora": {},
    "blob": {"optimiser": "split", "kl_scaling": "blob"},
}
"""Settings by name, which begins with the posterior's. Parts are as large as those of all processes together."""


def first_step(name, processes):
    """Gradients of the first step of a run, and what it told."""
    posterior, changes = name.split()[0], dict(CASES[name])
    settings = {"flipout": "off"} if posterior == "blob" else {}
    model = adapted(posterior=posterior, settings=settings, init_weights="aim" in changes)
    processes.shard(model.get_base_model(), find_holder(model))
    if "micro_batch" in changes:
        changes["micro_batch"] //= processes.count
    fit = make_fit(model, fit={"processes": processes}, batch_size=COUNT, epochs=1, clip=UNCLIPPED, **changes)
    fit._aim()
    taken = fit._take_step(0)
    return {**gradients(model), "figures": taken.figures}


def main():
    processes = Processes.join("cpu")
    found = {}
    for name in CASES:
        found |= {f"{name}/{key}": value for key, value in first_step(name, processes).items()}
    if processes.main:
        save_file({name: value.contiguous().clone() for name, value in found.items()}, sys.argv[1])


if __name__ == "__main__":
    main()

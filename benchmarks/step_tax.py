"""What data parallelism adds to a training step on GPUs: torch's engine and this one, on four models.

Contenders run in turns, in blocks of steps between two CUDA events; ratios are taken between blocks of the same round
and their median is reported. "limit" is a step whose only communication is an all-reduce of one element: no engine
that keeps ranks together can be faster.

    torchrun --standalone --nproc-per-node 2 benchmarks/step_tax.py --json step_tax.json --picture step_tax.png
"""

from _contenders import TORCH_BATCHED, Contender, step_engines
from _step_run import main


def contenders(device_type: str) -> tuple[list[Contender], dict[str, str]]:
    """All engines but torch's batched mode, whose figures host_cost.py has."""
    found, missing = step_engines(device_type)
    missing.pop(TORCH_BATCHED, None)
    return [contender for contender in found if contender.name != TORCH_BATCHED], missing


if __name__ == "__main__":
    main("step_tax", __doc__.splitlines()[0], contenders)

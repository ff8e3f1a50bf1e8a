"""The Markdown table of results of ``lockstep bench scaling --json``: measures nothing.

    python benchmarks/scaling_table.py FILE...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TITLES = {"resnet50": "ResNet-50", "gpt_small": "GPT-small", "gpt_medium": "GPT-medium", "gpt_xl": "GPT-xl"}
#: Parts of the lost time that get a column; each has its names in the tool's table.
PARTS = {
    "data": ("data waiting",),
    "computing": ("slower computing", "host-bound launches"),
    "exposed comm.": ("exposed communication", "small buckets"),
    "kernels added": ("kernels added",),
    "skew": ("skew between ranks",),
    "optimizer": ("optimizer",),
    "other": ("other",),
}


def markdown(results: Iterable[dict[str, Any]]) -> list[str]:
    """One row a result, and below the table how they were taken."""
    results = list(results)
    lines = [
        "| model | T1, ms | Tn, ms | E [95 % interval] | lost, ms | " + " | ".join(PARTS) + " | together |",
        "| --- |" + " ---: |" * (5 + len(PARTS)),
    ]
    lines += [_row(result) for result in results]
    lines += ["", "Medians; the columns behind the lost time are its parts, by trimmed means."]
    known: dict[str, list[str]] = {}
    for result in results:
        known.setdefault(_conditions(result), []).append(_title(result))
    return lines + [f"{', '.join(models)}: {text}." for text, models in known.items()]


def _row(result: dict[str, Any]) -> str:
    shares = [_share(result, names) for names in PARTS.values()]
    efficiency = result["efficiency"]
    cells = [
        _title(result),
        *(f"{1e3 * result[run]['median']:.1f}" for run in ("one", "many")),
        f"{efficiency['median']:.3f} [{efficiency['low']:.3f}, {efficiency['high']:.3f}]",
        f"{1e3 * result['lost']:.1f}",
        *(_percent(share) for share in shares),
        _percent(sum(cause["share"] for cause in result["causes"]) if result["lost"] > 0 else None),
    ]
    return "| " + " | ".join(cells) + " |"


def _share(result: dict[str, Any], names: tuple[str, ...]) -> float | None:
    found = [cause["share"] for cause in result["causes"] if cause["name"] in names]
    return sum(found) if found and None not in found else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{round(100 * share)} %"


def _title(result: dict[str, Any]) -> str:
    name = result["recipe"].rpartition(":")[2]
    return TITLES.get(name, name)


def _conditions(result: dict[str, Any]) -> str:
    found, ranks = result["environment"], result["world_size"]
    where = f"{ranks} x {found['gpu']}" if found["device"] == "cuda" else f"{ranks} ranks on {found['cores']} CPU cores"
    kind = "weak scaling, E = T1 / Tn" if result["weak"] else f"fixed global batch, E = T1 / ({ranks} Tn)"
    versions = f"torch {found['torch']}, lockstep {found['lockstep']}"
    if found["device"] == "cuda":
        versions += f", NCCL {found['nccl']}, driver {found['driver'] or 'unknown'}"
    rounds = len(result["rounds"])
    return f"{where}, {result['transport']}; {versions}; {found['date']}; {kind}; {rounds} rounds in turns"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("\n".join(markdown(json.loads(Path(name).read_text()) for name in sys.argv[1:])))

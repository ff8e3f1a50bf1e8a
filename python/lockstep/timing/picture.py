"""One step's overlap as a picture: what backward hid, and what it did not."""

from __future__ import annotations

from pathlib import Path

from lockstep._codes import Code, tagged
from lockstep.timing.comm_report import Pass

#: Buckets that get a line of their own label.
_LABELLED = 24


def draw(one: Pass, path: Path, rank: int, ranks: int) -> None:
    """Write it to ``path``; the suffix decides the format.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        text = "the picture needs matplotlib: pip install 'torch-lockstep[tools]'."
        raise RuntimeError(tagged(Code.MISSING_EXTRA, text)) from error

    def ms(moment: float) -> float:
        return 1e3 * (moment - one.forward_start)

    colours = {
        "forward": "tab:gray",
        "backward": "tab:blue",
        "exposed communication": "tab:red",
        "bucket ready, not its turn": "gold",
        "pack and send": "tab:green",
        "on the wire": "tab:purple",
        "end of backward waits": "tab:red",
    }
    rows = len(one.buckets) + 1
    figure = Figure(figsize=(9, min(12, 2.2 + 0.28 * rows)), layout="constrained")
    axes = figure.subplots()

    def bar(row: int, begin: float, end: float, what: str, height: float = 0.7, shift: float = 0.0) -> None:
        axes.barh(row + shift, ms(end) - ms(begin), left=ms(begin), height=height, color=colours[what], linewidth=0)

    bar(0, one.forward_start, one.backward_start, "forward")
    bar(0, one.backward_start, one.backward_end, "backward")
    bar(0, one.backward_end, one.end, "exposed communication")
    for row, bucket in enumerate(one.buckets, start=1):
        bar(row, bucket.ready, bucket.started, "bucket ready, not its turn")
        bar(row, bucket.started, bucket.sent, "pack and send")
        for collective in bucket.collectives:
            bar(row, collective.begun, collective.ended, "on the wire", height=0.36, shift=-0.17)
        bar(row, bucket.wait_start, bucket.wait_end, "end of backward waits", height=0.3, shift=0.2)
    axes.axvline(ms(one.backward_end), color="black", linestyle=":", linewidth=1)
    every = max(1, len(one.buckets) // _LABELLED + 1)
    labelled = [(row, bucket) for row, bucket in enumerate(one.buckets, start=1) if (row - 1) % every == 0]
    names = [f"bucket {bucket.number}, {_size(bucket.size)}" for _, bucket in labelled]
    axes.set_yticks([0, *(row for row, _ in labelled)], ["step", *names])
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlabel("milliseconds since forward began (dotted: last gradient of this rank)")
    hidden = 1e3 * one.exposed
    axes.set_title(f"Rank {rank} of {ranks}, pass {one.number}: {hidden:.2f} ms of communication exposed")
    axes.grid(axis="x", alpha=0.3)
    handles = [Patch(color=colour, label=what) for what, colour in colours.items() if what != "exposed communication"]
    handles[-1].set_label("exposed: end of backward waits")
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=150)


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 1024:.1f} KiB"

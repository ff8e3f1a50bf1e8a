"""Write scikit-learn's handwritten digits as one small binary file for the C++ example.

    python csrc/examples/export_digits.py digits.bin

The split is that of ``python -m lockstep.examples.digits``: 1,437 images to train on and 360 to test on. The file: the
eight bytes ``LSDIGITS``, two little-endian int32 (training and test images), then for each of the two parts all images
(64 bytes each, values 0 to 16) and all labels (one byte each).
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main(path: Path) -> None:
    """Write the file ``path``."""
    digits = load_digits()
    parts = train_test_split(range(len(digits.target)), test_size=360, random_state=0, stratify=digits.target)
    content = b"LSDIGITS" + struct.pack("<ii", *map(len, parts))
    for part in parts:
        content += digits.images[part].astype(numpy.uint8).tobytes()
        content += digits.target[part].astype(numpy.uint8).tobytes()
    path.write_bytes(content)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python export_digits.py FILE")
    main(Path(sys.argv[1]))

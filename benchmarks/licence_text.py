"""The text on which fidelity is measured: four licences as Debian ships them, one after the other.

    python benchmarks/licence_text.py FILE

The text is fixed by its hash, so that perplexities of different engines and days can be compared.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

FOLDER = Path("/usr/share/common-licenses")
NAMES = ("Apache-2.0", "GPL-3", "MPL-2.0", "LGPL-2.1")
SHA256 = "3a59c4b0baab0fcebc5be6bbbca057415103f500aaa7ff07229cb18d7428b713"


def licence_text(folder: Path = FOLDER) -> bytes:
    """The 89,763 bytes of the text. Raises FileNotFoundError where the files are not there, ValueError where they differ."""
    text = b"".join((folder / name).read_bytes() for name in NAMES)
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        raise ValueError(f"{folder} holds other texts: sha256 {found}, wanted {SHA256}. Debian's package base-files has them.")
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/licence_text.py FILE")
    try:
        Path(sys.argv[1]).write_bytes(licence_text())
    except (OSError, ValueError) as error:
        sys.exit(str(error))

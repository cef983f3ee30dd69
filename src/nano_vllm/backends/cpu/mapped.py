"""Weights that are used where they lie in a file: mapped, not copied, and read ahead while the first prompt already runs."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from types import ModuleType

import numpy as np

from ...errors import ModelFileError
from ...formats import Tensor
from ...memory.machine import free_memory

PIECE = 4 << 20  # bytes read ahead between two looks at whether that is still wanted


class Mapped:
    """The tensors of `weights` that lie in a file as the kernels read them (`Weights.place`); none of other weights.

    The mapping is read-only and lasts as long as an array of it does. The file is replaced as a whole when it is converted
    anew, never written to, so what is mapped does not change.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._place = getattr(weights, "place", lambda name: None)
        self._files: dict = {}
        self.arrays: list[np.ndarray] = []

    def packed(self, name: str) -> np.ndarray | None:
        """(bytes,) uint8 of a packed matrix; None where it must be packed. ModelFileError where the file has become shorter."""
        place = self._place(name)
        if place is None:
            return None
        if place.path not in self._files:
            with open(place.path, "rb") as file:
                self._files[place.path] = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        array = self._files[place.path][place.offset : place.offset + place.nbytes]
        if len(array) != place.nbytes:
            raise ModelFileError(f"{place.path} became shorter while it was opened", f"{name!r} ends behind it", "Load it again.")
        self.arrays.append(array)
        return array

    def read_ahead(self, native: ModuleType) -> ReadAhead | None:
        """What reads all of it in a thread of its own, in the order in which a step does; None where there is nothing to read, or
        more than the memory holds, where reading ahead would push out what is still needed."""
        total = sum(array.nbytes for array in self.arrays)
        return ReadAhead(native, self.arrays) if 0 < total < free_memory() // 2 else None


class ReadAhead:
    """Begins at once; `stop` ends it and waits for that."""

    def __init__(self, native: ModuleType, arrays: list[np.ndarray]) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(native, arrays), name="nano-vllm read ahead", daemon=True)
        self._thread.start()

    def _run(self, native: ModuleType, arrays: list[np.ndarray]) -> None:
        for array in arrays:
            for first in range(0, len(array), PIECE):
                if self._stopped.is_set():
                    return
                native.populate(array[first : first + PIECE])

    def wait(self) -> None:
        """Until all is read."""
        self._thread.join()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

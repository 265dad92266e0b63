"""Own safetensors reader: header + memory map, so that bf16 and fp8 tensors come out without a framework.

File: 8-byte little-endian header length, JSON header ``{name: {dtype, shape, data_offsets}}``, raw data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class WeightLoadError(RuntimeError):
    """A checkpoint's weights cannot be used. Names files and tensors."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one tensor lies. :meth:`open` maps it without reading."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def open(self) -> np.ndarray:
        """Read-only view of the tensor in the file; bytes are read when touched."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def read_header(path: Path) -> dict[str, TensorRef]:
    """Tensors of one file. Raises WeightLoadError naming the file for anything malformed or truncated."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise WeightLoadError(
                    f"{path}: header of {length} bytes does not fit a file of {size}; is it truncated?"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise WeightLoadError(f"{path} cannot be read: {error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightLoadError(f"{path}: not a safetensors file (header is not JSON: {error})") from None
    if not isinstance(header, dict):
        raise WeightLoadError(f"{path}: not a safetensors file (header is no JSON object)")
    refs = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not _well_formed(entry):
            raise WeightLoadError(f"{path}: tensor {name} has the header {entry!r}; is the file damaged?")
        refs[name] = _tensor_ref(path, name, entry, 8 + length, size)
    return refs


def _well_formed(entry: Any) -> bool:
    """``{"dtype": text, "shape": sizes, "data_offsets": [begin, end]}``."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)

    return (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and sizes(entry.get("shape"))
        and sizes(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    )


def _tensor_ref(path: Path, name: str, entry: dict[str, Any], data_start: int, file_size: int) -> TensorRef:
    if entry["dtype"] not in _DTYPES:
        raise WeightLoadError(
            f"{path}: tensor {name} has dtype {entry['dtype']}, known: {', '.join(_DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    ref = TensorRef(path, name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), data_start + begin)
    if end - begin != ref.nbytes or data_start + end > file_size:
        raise WeightLoadError(
            f"{path}: tensor {name} {list(ref.shape)} needs {ref.nbytes} bytes at {ref.offset}, the file has "
            f"{end - begin} of {file_size} there; download it again"
        )
    return ref


def _indexed_files(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(weight_map.values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightLoadError(
            f"{index} has no usable weight_map ({type(error).__name__}: {error}); download it again, or delete it "
            "to read every *.safetensors file"
        ) from None


def find_tensors(folder: Path) -> dict[str, TensorRef]:
    """All tensors of a checkpoint folder: the files of ``model.safetensors.index.json``, else every ``*.safetensors``.

    Raises WeightLoadError when there is none, a file of the index is missing, or a name occurs twice.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in _indexed_files(index)]
        absent = [f.name for f in files if not f.exists()]
        if absent:
            raise WeightLoadError(f"{index} lists files that are not in the folder: {', '.join(absent)}")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightLoadError(
            f"{folder} holds no *.safetensors file (use --load-format dummy for random weights)"
        )
    found: dict[str, TensorRef] = {}
    for file in files:
        for name, ref in read_header(file).items():
            if name in found:
                raise WeightLoadError(f"tensor {name} is in both {found[name].path.name} and {file.name}")
            found[name] = ref
    return found

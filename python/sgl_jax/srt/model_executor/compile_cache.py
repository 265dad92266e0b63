"""JAX's persistent compilation cache: where it lives, and when it must stay off.

The folder is ``SGL_JAX_CACHE_DIR``, else JAX's own setting (``JAX_COMPILATION_CACHE_DIR``), else ``~/.cache/sgl-jax``. A folder of ours (all but JAX's own setting) gets a subfolder per JAX version and machine kind, because XLA's CPU code is only valid for the processor features it
was compiled for and a home folder may be shared between machines.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger(__name__)

CACHE_DIR_VARIABLE = "SGL_JAX_CACHE_DIR"


def _machine_key() -> str:
    """Short hash of what makes compiled CPU code portable: architecture and processor features."""
    features = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                features = line
                break
    except OSError:
        pass  # not Linux: the processor string has to do
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:8]


def cache_folder() -> Path:
    """Subfolder of ``SGL_JAX_CACHE_DIR``, else of ``~/.cache/sgl-jax``, for this JAX and machine."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    root = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "sgl-jax"
    return root / f"xla-jax{jax.__version__}-{platform.machine()}-{_machine_key()}"


def starts_at_first_device(devices: Sequence[Any]) -> bool:
    """True when ``devices`` are the first ones of their platform, in order."""
    return [d.id for d in devices] == [d.id for d in jax.devices(devices[0].platform)[: len(devices)]]


def enable_compile_cache(devices: Sequence[Any]) -> Path | None:
    """Switch the persistent cache on for a mesh over ``devices``. Returns the folder, or None when the cache is off.

    Idempotent. Off, with a log line that says why, for a device subset that does not start at the platform's first device
    (a warm read for such a subset crashes the TPU runtime, D73), and where the folder cannot be made.
    """
    if not starts_at_first_device(devices):
        jax.config.update("jax_enable_compilation_cache", False)
        logger.warning(
            "compilation cache off: the mesh uses devices %s, not the first of the platform; "
            "a warm cache is unsafe for such a subset",
            [d.id for d in devices],
        )
        return None
    preset = jax.config.jax_compilation_cache_dir
    if preset and not os.environ.get(CACHE_DIR_VARIABLE):
        folder = Path(preset)
    else:
        folder = cache_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("compilation cache off: cannot make %s (%s)", folder, error)
            return None
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_enable_compilation_cache", True)
    logger.info("compilation cache: %s", folder)
    return folder

"""Server arguments: one flag table, resolution with provenance, conflicts that stop the start. Imports no jax."""

from sgl_jax.srt.server_args.args import FIELD_NAMES, SOURCES, ServerArgs, prepare_server_args
from sgl_jax.srt.server_args.errors import FlagConflictError, ServerArgsError
from sgl_jax.srt.server_args.sizes import parse_size

__all__ = [
    "FIELD_NAMES",
    "SOURCES",
    "FlagConflictError",
    "ServerArgs",
    "ServerArgsError",
    "parse_size",
    "prepare_server_args",
]

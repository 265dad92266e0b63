"""``python -m sgl_jax.test.entrypoints.fake_server FLAGS``: the real front end over the fake scheduler."""

from __future__ import annotations

import sys

from sgl_jax.launch_server import configure_logging
from sgl_jax.srt.server_args import ServerArgs

if __name__ == "__main__":
    from sgl_jax.srt.entrypoints.http_server import launch
    from sgl_jax.test.entrypoints.fake_scheduler import run_fake_scheduler

    args = ServerArgs.from_cli(sys.argv[1:])
    configure_logging(args.log_level)
    sys.exit(launch(args, target=run_fake_scheduler))

"""`jaxmoe router`: one address in front of prefill and decode workers."""

import argparse

from serving.http import server
from serving.router.app import make_app
from serving.router.policy import POLICIES
from serving.router.pool import Pool


DRAIN_SECONDS = 10.0  # that requests under way may finish in at shutdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            nargs="+",
            action="extend",
            default=[],
            metavar="URL",
            help=f"{role} workers, http://HOST:PORT; others may register",
        )
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=30000, help="0 picks a free one (%(default)s)")
    add(
        "--policy",
        choices=POLICIES,
        default="cache_aware",
        help="how a worker is chosen (%(default)s)",
    )
    add(
        "--max-retries",
        type=int,
        default=2,
        metavar="N",
        help="times a request that failed is sent to other workers (%(default)s)",
    )
    add(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="for which a worker may be silent in a request; no limit by default",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Route until SIGINT or SIGTERM; the exit status. Raises ValueError for what is refused."""
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, got {args.port}")
    if args.max_retries < 0:
        raise ValueError(f"--max-retries must not be negative, got {args.max_retries}")
    if args.request_timeout is not None and not args.request_timeout > 0:
        raise ValueError(f"--request-timeout must be above 0, got {args.request_timeout:g}")
    pool = Pool(args.prefill, args.decode)
    server.set_up_logging(args.log_level)
    app = make_app(
        pool,
        policy=args.policy,
        max_retries=args.max_retries,
        request_timeout=args.request_timeout,
    )
    with server.listen(args.host, args.port) as listener:
        server.run(app, listener, log_level=args.log_level, drain_timeout=DRAIN_SECONDS)
    return 0

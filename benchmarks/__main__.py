"""All benchmarks, or those that are named."""

from benchmarks import (
    collect,
    containers,
    disk,
    engine,
    gateway,
    growth,
    journal,
    linear,
    overload,
    token_check,
    tokens,
    traces,
    tracking,
    view,
)
from benchmarks.figures import main

if __name__ == "__main__":
    main(
        {
            "growth": growth.figures,
            "linear": linear.figures,
            "disk": disk.figures,
            "journal": journal.figures,
            "engine": engine.figures,
            "gateway": gateway.figures,
            "overload": overload.figures,
            "traces": traces.figures,
            "tracking": tracking.figures,
            "collect": collect.figures,
            "containers": containers.figures,
            "tokens": tokens.figures,
            "token_check": token_check.figures,
            "view": view.figures,
        }
    )

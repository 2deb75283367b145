"""All benchmarks, or those that are named."""

from benchmarks import disk, engine, gateway, growth, journal, linear, traces
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
            "traces": traces.figures,
        }
    )

"""Runs tests again and again while two processes keep the cores busy: `python tests/under_load.py 20 tests/view …`."""

import subprocess
import sys

_BUSY = [sys.executable, "-c", "while True: pass"]


def main(times: int, tests: list[str]) -> int:
    """Stop at the first run that fails."""
    busy = [subprocess.Popen(_BUSY) for _ in range(2)]
    try:
        for time in range(times):
            print(f"run {time + 1} of {times}", flush=True)
            code = subprocess.run([sys.executable, "-m", "pytest", "-x", *tests]).returncode
            if code:
                return code
    finally:
        for process in busy:
            process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

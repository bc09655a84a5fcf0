"""The entry point of `sae` and `python -m saecli`."""

import resource
import sys
from contextlib import suppress

# Open at once: a lock for each run of a sweep, and for each hook point of an extraction.
FILES = 4096


def main() -> None:
    """Run the command line; Ctrl-C ends it with status 130, also while libraries are loaded."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < allowed < FILES:
        with suppress(OSError, ValueError):  # a system may allow less
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (FILES if most < 0 else min(most, FILES), most)
            )
    try:
        from .cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`warmturn bench` from a source tree: `make bench`. See `warmturn bench --help`."""

from __future__ import annotations

import sys

from server.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))

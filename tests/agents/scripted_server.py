"""``warmturn serve`` with a scripted model: ``python -m agents.scripted_server MODEL SCRIPT [flags]``."""

from __future__ import annotations

import os
import sys

from server.__main__ import main

COMMAND = (sys.executable, "-P", "-m", "agents.scripted_engine")

if __name__ == "__main__":
    model, script, *flags = sys.argv[1:]
    os.environ |= {"AGENTS_MODEL": model, "AGENTS_SCRIPT": script}
    sys.exit(main(["serve", model, *flags], COMMAND))

"""What `ray job submit -- python jobs/tune.py ...` runs; takes the options of `fluxray tune`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fluxray.cli import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])

"""What `ray job submit -- python jobs/encode.py ...` runs; takes the options of `fluxray encode`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fluxray.cli import main

if __name__ == "__main__":
    main(["encode", *sys.argv[1:]])

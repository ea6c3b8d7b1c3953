"""What `make train-images` runs; takes keys of the configuration (KEY=VALUE)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fluxray.cli import main

if __name__ == "__main__":
    main(["train-images", *sys.argv[1:]])

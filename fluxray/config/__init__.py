"""The frozen configuration of a run, and how it is resolved."""

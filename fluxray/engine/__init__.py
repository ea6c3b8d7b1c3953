"""Ways to run one optimizer step."""

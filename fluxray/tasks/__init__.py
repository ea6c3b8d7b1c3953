"""What is learned from a batch."""

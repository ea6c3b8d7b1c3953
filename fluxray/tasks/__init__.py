"""What is learned: batches and losses."""

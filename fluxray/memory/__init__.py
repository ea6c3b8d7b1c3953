"""What a run will take of device, host and disk, and how fast it will be, before anything is allocated."""

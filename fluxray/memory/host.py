"""What the system lets this process have of the host. No torch: `fluxray doctor` asks it before it knows that torch works."""


def container_limit() -> int | None:
    """Return the memory limit in bytes that the kernel's control group sets for this process, None if there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None

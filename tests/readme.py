"""The shell commands of a document. One that needs more than a test has, or the first line of its block, says `# needs WHAT`."""

import re
from pathlib import Path

NEEDS = "# needs "


def shell_blocks(doc: Path) -> list[list[str]]:
    """Return the lines of each block of shell commands; one that goes on after a backslash is one line."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", doc.read_text(), flags=re.DOTALL)
    return [[line for line in re.sub(r"\\\n\s*", "", block).splitlines() if line.strip()] for block in blocks]


def commands_without_needs(doc: Path) -> list[str]:
    """Return the commands that a test can run, without their comments."""
    blocks = [block for block in shell_blocks(doc) if not block[0].startswith(NEEDS)]
    return [line.partition(" #")[0].strip() for block in blocks for line in block if NEEDS not in line]

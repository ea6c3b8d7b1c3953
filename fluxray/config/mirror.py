"""What a `checkpoint.mirror` may say."""

import re
from urllib.parse import parse_qsl, urlsplit

from fluxray.errors import ConfigError

MIRROR_OPTIONS = {"s3": {"region", "endpoint_override", "scheme"}, "gs": {"endpoint_override", "scheme"}, "file": set[str]()}
"""What the query of a `checkpoint.mirror` may say, by its scheme."""


def check_mirror(address: str, key: str = "checkpoint.mirror") -> None:
    """Raise ConfigError unless `address` names a bucket or folder of a known kind; without credentials, which are never shown."""
    forms = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER"
    if re.search(r"://[^/?#]*@", address):
        raise ConfigError(f"{key}: holds credentials; leave them to the environment, such as AWS_ACCESS_KEY_ID")
    try:
        parts = urlsplit(address)
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigError(f"{key}: {address!r} is no address; use {forms}") from None
    known = MIRROR_OPTIONS.get(parts.scheme)
    if known is None:
        raise ConfigError(f"{key}: {address!r} has no known scheme; use {forms}")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ConfigError(f"{key}: {address!r} names no absolute folder; use file:///FOLDER")
    if parts.scheme != "file" and not parts.netloc:
        raise ConfigError(f"{key}: {address!r} names no bucket; use {parts.scheme}://BUCKET/PREFIX")
    for option, value in options:
        if option not in known or not value:
            shown = f"no option {option!r}" if option not in known else f"no value of {option!r}"
            raise ConfigError(f"{key}: {parts.scheme}:// has {shown}; it takes {', '.join(sorted(known)) or 'none'}")

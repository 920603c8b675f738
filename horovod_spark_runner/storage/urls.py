"""Remove secrets from URLs."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def without_secrets(text: str) -> str:
    """Return ``text`` without the user, password and query of a URL, if it is one."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return text.partition("://")[0] + "://…"
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))

"""Whether the Hugging Face Hub is there: offline, a mistyped name would cost half a minute of retries."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

_OFFLINE = "HF_HUB_OFFLINE"
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def go_offline_if_needed(*names: str) -> None:
    """Puts the Hugging Face libraries into their offline mode if one of `names` is no local path and the Hub's host is
    unknown here. To be called before they are imported; what is in their caches is still found."""
    if all(name == "-" or os.path.exists(os.path.expanduser(name)) for name in names):
        return
    if _OFFLINE in os.environ or any(name in os.environ for name in _PROXIES):
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ[_OFFLINE] = "1"

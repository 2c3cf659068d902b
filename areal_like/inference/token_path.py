"""Where vLLM servers of ours are asked for tokens, as both ends know it: the path, and what is spoken there. Pure."""

from __future__ import annotations

#: answered by ``vllm_plugin/token_route.py`` in a server that was started with our ``--middleware``
PATH = "/areal_like/generate"
#: a server that has another version of this package may speak another
PROTOCOL = 1

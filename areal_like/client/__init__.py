"""Generation over HTTP: interruptible requests, the pool of servers, routing, control calls. Imports no torch."""

"""Ways for the bytes of a version to travel: ``disk`` and ``shm``, behind one interface (``base``)."""

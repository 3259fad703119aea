"""Many clients at once, over plain ZeroMQ sockets, each of whose answers is known beforehand."""

"""Every socket of the program, one class per role; the only package that imports zmq."""

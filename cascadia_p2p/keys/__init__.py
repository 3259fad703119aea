"""Key files on disk, and the list of clients that a fleet admits; what is read and written, no socket."""

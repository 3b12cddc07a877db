"""The broker: the one process that decides, remembers and answers."""

"""The schema of the first release, which `store` makes from the tables.

A later release that changes the tables adds a migration from here.
"""

revision = "v1b"
down_revision = None


def upgrade() -> None:
    pass

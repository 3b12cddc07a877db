"""The schema of the first release; `store` makes it from the tables.

A later release that changes the tables adds a migration that starts here.
"""

revision = "v1e"
down_revision = None


def upgrade() -> None:
    pass

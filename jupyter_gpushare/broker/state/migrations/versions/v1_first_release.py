"""The schema of the first release, which `store` creates from the tables.

A later release that changes the tables adds a migration that starts from this one.
"""

revision = "v1e"
down_revision = None


def upgrade() -> None:
    pass

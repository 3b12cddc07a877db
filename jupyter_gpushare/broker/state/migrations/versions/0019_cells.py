"""A table for stretches of work of sessions, from which traces for the simulator are made."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "cells",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("lease", sa.String(64), nullable=False),
        sa.Column("user", sa.String(255), nullable=False),
        sa.Column("project", sa.String(255), nullable=False),
        sa.Column("gpus", sa.Float, nullable=False),
        sa.Column("began_at", sa.String(40), nullable=False),
        sa.Column("duration_s", sa.Float, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("cells")

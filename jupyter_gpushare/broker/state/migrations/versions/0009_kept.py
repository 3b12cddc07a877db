"""Seconds for which users kept idle sessions: a budget per day."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage", sa.Column("kept_s", sa.Float, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("usage", "kept_s")

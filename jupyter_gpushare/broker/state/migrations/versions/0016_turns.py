"""A column for how often a job got capacity because it had waited for long."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leases", sa.Column("turns", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("leases", "turns")

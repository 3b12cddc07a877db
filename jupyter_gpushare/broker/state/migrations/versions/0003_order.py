"""What the order of jobs reads: since when a lease waits, until when its service is counted."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leases", sa.Column("waits_since_at", sa.Float, nullable=False, server_default="0"))
    op.add_column("leases", sa.Column("attained_at", sa.Float))
    op.execute(sa.text("UPDATE leases SET waits_since_at = queued_at"))


def downgrade() -> None:
    op.drop_column("leases", "attained_at")
    op.drop_column("leases", "waits_since_at")

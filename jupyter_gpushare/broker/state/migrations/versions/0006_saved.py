"""GiB-seconds of host memory that suspended leases took."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage", sa.Column("saved_gib_s", sa.Float, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("usage", "saved_gib_s")

"""The MIG profile that a lease asks for."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leases", sa.Column("profile", sa.String(32), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("leases", "profile")

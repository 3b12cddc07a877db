"""GPU-seconds by day, user and project."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("user", sa.String(255), primary_key=True),
        sa.Column("project", sa.String(255), primary_key=True),
        sa.Column("used_gpu_s", sa.Float, nullable=False),
        sa.Column("lent_gpu_s", sa.Float, nullable=False),
    )
    op.create_index("ix_decisions_lease", "decisions", ["lease"])


def downgrade() -> None:
    op.drop_index("ix_decisions_lease", "decisions")
    op.drop_table("usage")

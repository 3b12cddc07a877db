"""A column for the highest priority in a project, as an administrator set it; null: as configured."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("projects", sa.Column("priority_max", sa.Integer))


def downgrade() -> None:
    op.drop_column("projects", "priority_max")

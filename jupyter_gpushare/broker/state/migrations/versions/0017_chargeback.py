"""Use by model of the GPU, with what computed and what was borrowed; until when a lease's use is counted."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_KEY = ("day", "user", "project")
_SUMS = ("used_gpu_s", "lent_gpu_s", "saved_gib_s", "kept_s")
_NEW_SUMS = ("computing_gpu_s", "borrowed_gpu_s")


def upgrade() -> None:
    op.add_column("leases", sa.Column("counted_at", sa.Float, nullable=False, server_default="0"))
    op.rename_table("usage", "usage_before")
    new = _new_table((*_KEY, "gpu"), (*_SUMS, *_NEW_SUMS))
    before = sa.table("usage_before", *map(sa.column, (*_KEY, *_SUMS)))
    known = [before.c[name] for name in (*_KEY, *_SUMS)]
    rows = sa.select(
        *known, sa.literal("").label("gpu"), *(sa.literal(0.0).label(name) for name in _NEW_SUMS)
    )
    op.execute(new.insert().from_select([*_KEY, *_SUMS, "gpu", *_NEW_SUMS], rows))
    op.drop_table("usage_before")


def downgrade() -> None:
    op.drop_column("leases", "counted_at")
    op.rename_table("usage", "usage_before")
    new = _new_table(_KEY, _SUMS)
    before = sa.table("usage_before", *map(sa.column, (*_KEY, *_SUMS)))
    key = [before.c[name] for name in _KEY]
    rows = sa.select(*key, *(sa.func.sum(before.c[name]) for name in _SUMS)).group_by(*key)
    op.execute(new.insert().from_select([*_KEY, *_SUMS], rows))
    op.drop_table("usage_before")


def _new_table(key: tuple[str, ...], sums: tuple[str, ...]) -> sa.Table:
    lengths = {"day": 10}
    return op.create_table(
        "usage",
        *(sa.Column(name, sa.String(lengths.get(name, 255)), primary_key=True) for name in key),
        *(sa.Column(name, sa.Float, nullable=False) for name in sums),
    )

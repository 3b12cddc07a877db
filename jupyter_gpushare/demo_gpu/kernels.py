"""The kernels of `demo_gpu`, in PTX, and the numbers of their pattern."""

from __future__ import annotations

# One word of the pattern is seed * SEED_FACTOR + index * INDEX_FACTOR; a step multiplies
# it by STEP_FACTOR and adds STEP_TERM (a full-period generator: Knuth's MMIX constants).
SEED_FACTOR = 0x9E3779B97F4A7C15
INDEX_FACTOR = 0xBF58476D1CE4E5B9
STEP_FACTOR = 0x5851F42D4C957F2D
STEP_TERM = 0x14057B7EF767814F

_HEAD = ".version 6.3\n.target sm_75\n.address_size 64\n"
_ENTRY = """
.visible .entry {name}(.param .u64 words, .param .u64 count, .param .u64 extra)
{{
    .reg .pred %p;
    .reg .b32 %b, %t, %n, %g;
    .reg .b64 %words, %count, %extra, %i, %stride, %at, %word, %sum, %start, %now, %w;
    ld.param.u64 %words, [words];
    ld.param.u64 %count, [count];
    ld.param.u64 %extra, [extra];
    cvta.to.global.u64 %words, %words;
    mov.u64 %start, %globaltimer;
    mov.u64 %sum, 0;
    mov.u32 %b, %ctaid.x;
    mov.u32 %t, %tid.x;
    mov.u32 %n, %ntid.x;
    mov.u32 %g, %nctaid.x;
    mul.wide.u32 %i, %b, %n;
    cvt.u64.u32 %at, %t;
    add.u64 %i, %i, %at;
    mul.wide.u32 %stride, %n, %g;
next:
    setp.ge.u64 %p, %i, %count;
    @%p bra done;
    shl.b64 %at, %i, 3;
    add.u64 %at, %at, %words;
{body}
    add.u64 %i, %i, %stride;
    bra next;
done:
{after}
    ret;
}}
"""

PTX = (
    _HEAD
    + _ENTRY.format(
        name="gpushare_demo_fill",
        body=f"""    mul.lo.u64 %word, %extra, {SEED_FACTOR};
    mul.lo.u64 %w, %i, {INDEX_FACTOR};
    add.u64 %word, %word, %w;
    st.global.u64 [%at], %word;""",
        after="",
    )
    + _ENTRY.format(
        name="gpushare_demo_step",
        body=f"""    ld.global.u64 %word, [%at];
    mul.lo.u64 %word, %word, {STEP_FACTOR};
    add.u64 %word, %word, {STEP_TERM};
    st.global.u64 [%at], %word;""",
        after="""    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %p, %now, %extra;
    @%p bra done;""",
    )
    + _ENTRY.format(
        name="gpushare_demo_sum",
        body="""    ld.global.u64 %word, [%at];
    shl.b64 %w, %i, 1;
    add.u64 %w, %w, 1;
    mul.lo.u64 %word, %word, %w;
    add.u64 %sum, %sum, %word;""",
        after="""    cvta.to.global.u64 %at, %extra;
    red.global.add.u64 [%at], %sum;""",
    )
)

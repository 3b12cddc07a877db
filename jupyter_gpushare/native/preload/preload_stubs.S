/* The preload library's entry points that pass on arguments of any type.
 *
 * `dlsym` ends in a jump to glibc's dlsym, which finds its caller (RTLD_NEXT) from the return address:
 * with a call, the caller would always be this library.  The stubs of hooks.h count and jump, so that
 * arguments in registers and on the stack stay untouched.  They use from preload.c and preload_driver.c:
 *
 *   gpushare_counters         this process's counters of work, calls and queries in a row
 *                             (lease_client.h), 0 before its first call
 *   gpushare_phase            the address of the lease's phase, followed by its turn; read after counting
 *   gpushare_real[i]          the driver's function behind hook i, 0 if not looked up yet
 *   gpushare_enter(i)         counts, waits while the lease is suspended, and returns the jump target
 *   gpushare_dlsym(h, name)   the answer instead of glibc's dlsym, or 0
 *
 * After the hooks of hooks.h come GPUSHARE_SPARES spare hooks of GPUSHARE_SPARE_BYTES each.
 */
#include "preload_stubs.h"

/* A build with sanitizers uses another name, because their start-up uses dlsym before they work. */
#ifndef GPUSHARE_DLSYM
#define GPUSHARE_DLSYM dlsym
#endif

    .hidden gpushare_counters
    .hidden gpushare_phase
    .hidden gpushare_real
    .hidden gpushare_enter
    .hidden gpushare_dlsym
    .hidden gpushare_real_dlsym
    .hidden gpushare_spares
    .globl gpushare_spares

    .text
    .set index, 0

.macro function name
    .p2align 4
    .globl \name
    .type \name, %function
\name:
    .cfi_startproc
.endm

.macro end name
    .cfi_endproc
    .size \name, . - \name
.endm

#if defined __x86_64__

/* The instruction that reads the phase alone, or with the turn behind it. */
#define PHASE cmpl
#define PHASE_AND_TURN cmpq

.macro slow_entry
    endbr64
    movl $index, %eax
    jmp slow
.endm

.macro fast_entry offset compare
    endbr64
    movq gpushare_counters(%rip), %r11
    movq gpushare_real + 8 * index(%rip), %r10
    testq %r11, %r11
    je 1f
    testq %r10, %r10
    je 1f
    lock incq \offset(%r11)
    movq gpushare_phase(%rip), %r11
    \compare $0, (%r11)
    jne 1f
    jmp *%r10
1:  movl $index, %eax
    jmp slow
.endm

    .p2align 4
    .type slow, %function
slow:
    .cfi_startproc
    pushq %rdi
    pushq %rsi
    pushq %rdx
    pushq %rcx
    pushq %r8
    pushq %r9
    subq $136, %rsp
    .cfi_adjust_cfa_offset 184
    movups %xmm0, (%rsp)
    movups %xmm1, 16(%rsp)
    movups %xmm2, 32(%rsp)
    movups %xmm3, 48(%rsp)
    movups %xmm4, 64(%rsp)
    movups %xmm5, 80(%rsp)
    movups %xmm6, 96(%rsp)
    movups %xmm7, 112(%rsp)
    movl %eax, %edi
    call gpushare_enter
    movq %rax, %r11
    movups (%rsp), %xmm0
    movups 16(%rsp), %xmm1
    movups 32(%rsp), %xmm2
    movups 48(%rsp), %xmm3
    movups 64(%rsp), %xmm4
    movups 80(%rsp), %xmm5
    movups 96(%rsp), %xmm6
    movups 112(%rsp), %xmm7
    addq $136, %rsp
    popq %r9
    popq %r8
    popq %rcx
    popq %rdx
    popq %rsi
    popq %rdi
    .cfi_adjust_cfa_offset -184
    jmp *%r11
    end slow

    function GPUSHARE_DLSYM
    endbr64
    pushq %rdi
    pushq %rsi
    subq $8, %rsp
    .cfi_adjust_cfa_offset 24
    call gpushare_dlsym
    addq $8, %rsp
    popq %rsi
    popq %rdi
    .cfi_adjust_cfa_offset -24
    testq %rax, %rax
    je 1f
    ret
1:  jmp *gpushare_real_dlsym(%rip)
    end GPUSHARE_DLSYM

#elif defined __aarch64__

#define PHASE w16
#define PHASE_AND_TURN x16

.macro slow_entry
    bti c
    mov w16, #index
    b slow
.endm

.macro fast_entry offset state
    bti c
    adrp x16, gpushare_counters
    ldr x16, [x16, :lo12:gpushare_counters]
    cbz x16, 1f
    add x16, x16, #\offset
    adrp x17, gpushare_real + 8 * index
    ldr x17, [x17, :lo12:gpushare_real + 8 * index]
    cbz x17, 1f
2:  ldxr x9, [x16]
    add x9, x9, #1
    stxr w10, x9, [x16]
    cbnz w10, 2b
    dmb ish
    adrp x16, gpushare_phase
    ldr x16, [x16, :lo12:gpushare_phase]
    ldr \state, [x16]
    cbnz \state, 1f
    br x17
1:  mov w16, #index
    b slow
.endm

    .p2align 4
    .type slow, %function
slow:
    .cfi_startproc
    stp x29, x30, [sp, #-224]!
    .cfi_adjust_cfa_offset 224
    .cfi_rel_offset x29, 0
    .cfi_rel_offset x30, 8
    mov x29, sp
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    str x8, [sp, #80]
    stp q0, q1, [sp, #96]
    stp q2, q3, [sp, #128]
    stp q4, q5, [sp, #160]
    stp q6, q7, [sp, #192]
    mov w0, w16
    bl gpushare_enter
    mov x16, x0
    ldp x0, x1, [sp, #16]
    ldp x2, x3, [sp, #32]
    ldp x4, x5, [sp, #48]
    ldp x6, x7, [sp, #64]
    ldr x8, [sp, #80]
    ldp q0, q1, [sp, #96]
    ldp q2, q3, [sp, #128]
    ldp q4, q5, [sp, #160]
    ldp q6, q7, [sp, #192]
    ldp x29, x30, [sp], #224
    .cfi_adjust_cfa_offset -224
    .cfi_restore x29
    .cfi_restore x30
    br x16
    end slow

    function GPUSHARE_DLSYM
    bti c
    stp x29, x30, [sp, #-32]!
    .cfi_adjust_cfa_offset 32
    .cfi_rel_offset x29, 0
    .cfi_rel_offset x30, 8
    mov x29, sp
    stp x0, x1, [sp, #16]
    bl gpushare_dlsym
    mov x9, x0
    ldp x0, x1, [sp, #16]
    ldp x29, x30, [sp], #32
    .cfi_adjust_cfa_offset -32
    .cfi_restore x29
    .cfi_restore x30
    cbz x9, 1f
    mov x0, x9
    ret
1:  adrp x16, gpushare_real_dlsym
    ldr x16, [x16, :lo12:gpushare_real_dlsym]
    br x16
    end GPUSHARE_DLSYM

#else
#error "the preload library knows x86_64 and aarch64"
#endif

.macro hook_TYPED name
    .set index, index + 1
.endm

.macro hook_fast name offset state
    function \name
    fast_entry \offset \state
    end \name
    .set index, index + 1
.endm

.macro hook_slow name
    function \name
    slow_entry
    end \name
    .set index, index + 1
.endm

#define HOOK(kind, name, ...) HOOK_##kind(name) ;
#define HOOK_TYPED(name) hook_TYPED name
#define HOOK_WORK(name) hook_fast name, 0, PHASE_AND_TURN
#define HOOK_HOST(name) hook_fast name, 0, PHASE
#define HOOK_CALL(name) hook_fast name, 8, PHASE
#define HOOK_QUERY(name) hook_fast name, 16, PHASE
#define HOOK_GATE(name) hook_slow name
#define HOOK_REFUSE(name) hook_slow name
#include "hooks.h"

    .p2align GPUSHARE_SPARE_SHIFT
gpushare_spares:
    .rept GPUSHARE_SPARES
    .p2align GPUSHARE_SPARE_SHIFT
    .cfi_startproc
    slow_entry
    .cfi_endproc
    .set index, index + 1
    .endr
    .p2align GPUSHARE_SPARE_SHIFT

    .section .note.GNU-stack, "", %progbits

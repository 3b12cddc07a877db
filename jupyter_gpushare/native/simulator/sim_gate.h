/* Shared by the parts of the simulated libcuda.  See sim_gpu.h for the state.
 *
 * Device memory of a process is ordinary private memory of that process that only this library
 * accesses.  So a checkpoint moves only numbers in the shared state.  The contents stay in place but
 * out of reach, because every call that could see them waits at the process's gate.
 */
#ifndef GPUSHARE_SIM_GATE_H
#define GPUSHARE_SIM_GATE_H

#include "../cuda_types.h"
#include "sim_gpu.h"

#define API __attribute__((visibility("default")))

struct CUctx_st {
    CUdevice device; /* ordinal */
    unsigned holders;
    bool primary, alive;
    uint32_t peers; /* bit: ordinal of a device whose memory this context may use */
};

struct sim_call {
    CUresult error;
    bool inside; /* false in a process that is locked */
};

enum sim_need { SIM_NEED_INIT, SIM_NEED_CONTEXT };

extern struct sim_process *sim_me; /* this process's entry, after cuInit */
extern pthread_mutex_t sim_local;  /* guards this process's own tables; never held while waiting */
extern _Thread_local CUcontext sim_context;

/* If the process's state is not on the device, a call that does not wait has the error
 * CUDA_ERROR_OPERATING_SYSTEM, and `sim_poll`, which needs a context, ends the process with SIGSEGV. */
struct sim_call sim_enter(enum sim_need need, bool waits);
struct sim_call sim_poll(void);
void sim_leave(struct sim_call *call);

#define ENTER_BY(entry)                                                         \
    __attribute__((cleanup(sim_leave))) struct sim_call sim_call_ = entry; \
    if (sim_call_.error)                                                        \
    return sim_call_.error

/* First line of every entry point that can block while the process is locked.  The entry ends when the
 * function returns. */
#define ENTER(need) ENTER_BY(sim_enter(need, true))

/* First line of an entry point that checks whether work has completed. */
#define POLL ENTER_BY(sim_poll())

/* First line of an entry point that reads what the process already knows.  It is not documented whether
 * such calls wait while the process is locked: they do with queries=wait. */
#define ASK \
    ENTER_BY(sim && sim->queries_wait ? sim_enter(SIM_NEED_INIT, true) : ((struct sim_call){CUDA_SUCCESS, false}))

/* Whether this process may use CUDA: it called cuInit, and was not forked after that. */
bool sim_is_initialized(void);

/* First line of a query about a device, which never waits; `device` becomes that of `ordinal`. */
#define KNOW(ordinal)                                        \
    if (!sim_is_initialized())                               \
        return CUDA_ERROR_NOT_INITIALIZED;                   \
    int device_ = sim_physical(ordinal);                     \
    if (device_ < 0)                                         \
        return CUDA_ERROR_INVALID_DEVICE;                    \
    const struct sim_device *device = &sim->device[device_]; \
    (void)device

/* Returns the device of an ordinal of this process, or -1. */
int sim_physical(CUdevice ordinal);
/* The current context's device. */
uint32_t sim_current_device(void);
/* Called in the child after fork: the child may not use CUDA if the parent had called cuInit. */
void sim_gate_in_child(void);
bool sim_was_forked(void);

#endif

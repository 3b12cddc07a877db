/* Shared by the parts of the simulated libnvidia-ml.  See sim_gpu.h for the state. */
#ifndef GPUSHARE_SIM_NVML_H
#define GPUSHARE_SIM_NVML_H

#include "../cuda_types.h"
#include "sim_gpu.h"

#define API __attribute__((visibility("default")))

typedef int nvmlReturn_t;
enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_UNKNOWN = 999,
};
enum { NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230 };
struct nvmlDevice_st {
    uint32_t index;
};

extern struct nvmlDevice_st sim_handles[SIM_DEVICES];
extern struct nvmlDevice_st sim_whole; /* the GPU that is divided into MIG instances */

/* Whether this process's handles are from the running driver. */
bool sim_nvml_is_open(void);

/* At the entry of a call about the system, or about a device: return the error to answer at once, if any. */
nvmlReturn_t sim_nvml_enter(void);
nvmlReturn_t sim_nvml_enter_device(nvmlDevice_t device);

#define ENTER_BY(entry)             \
    do {                            \
        nvmlReturn_t error = entry; \
        if (error)                  \
            return error;           \
    } while (0)
#define ENTER(device) ENTER_BY(sim_nvml_enter_device(device))
#define ENTER_SYSTEM ENTER_BY(sim_nvml_enter())

#endif

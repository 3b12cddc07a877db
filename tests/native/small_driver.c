/* A driver without a GPU, which has one device of 80 GiB with UUID 11..11: libcuda.so.1, libnvidia-ml.so.1
 * (with NVML) or libcupti.so.12 (with CUPTI).  Each is unloaded when it is closed for the last time. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default"))) int

static const uint64_t device_bytes = 80ull << 30;

#if defined NVML

API nvmlInit_v2(void) { return 0; }
API nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, 0; }
API nvmlDeviceGetHandleByUUID(const char *uuid, const void **device) { return *device = &device_bytes, !uuid; }
API nvmlDeviceGetUUID(const void *device, char *text, unsigned bytes)
{
    return strncpy(text, "GPU-11111111-1111-1111-1111-111111111111", bytes), !device;
}
API nvmlDeviceGetMemoryInfo(const void *device, uint64_t total_free_used[3])
{
    return total_free_used[0] = total_free_used[1] = device_bytes, total_free_used[2] = 0, !device;
}

#elif defined CUPTI

API cuptiActivityEnable(int kind) { return kind != 3; }

#else

API cuInit(unsigned flags) { return (int)flags; }
API cuDeviceGetCount(int *count) { return *count = 1, 0; }
API cuDeviceGetUuid_v2(char uuid[16], int device) { return memset(uuid, 0x11, 16), device; }
API cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = device_bytes, device; }
API cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, device; }
API cuCtxGetDevice(int *device) { return *device = 0; }
API cuCtxGetCurrent(const void **context) { return *context = &device_bytes, 0; }
API cuLaunchKernel(void *function) { return function == NULL; }
API cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    static _Atomic uint64_t next = 1 << 30;
    return *address = next += bytes, 0;
}
API cuMemFree_v2(uint64_t address) { return !address; }

#endif

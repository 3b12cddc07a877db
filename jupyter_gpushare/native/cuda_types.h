/* The part of the CUDA driver API's and NVML's binary interface that this folder uses.
 *
 * The build uses these declarations instead of CUDA headers.  Sources: the CUDA Driver API
 * reference 13.0 (docs.nvidia.com/cuda/cuda-driver-api: type names, enum values, struct
 * members) and the NVML API reference r580 (docs.nvidia.com/deploy/nvml-api).  Values and
 * layouts are part of those ABIs and never change for a published name.
 */
#ifndef GPUSHARE_CUDA_TYPES_H
#define GPUSHARE_CUDA_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice; /* an ordinal among the visible devices */
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef void (*CUhostFn)(void *);
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUarray_st *CUarray;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef uint64_t CUmemGenericAllocationHandle;

#define CUDA_CODES \
    CUDA_CODE(CUDA_SUCCESS, 0) \
    CUDA_CODE(CUDA_ERROR_INVALID_VALUE, 1) \
    CUDA_CODE(CUDA_ERROR_OUT_OF_MEMORY, 2) \
    CUDA_CODE(CUDA_ERROR_NOT_INITIALIZED, 3) \
    CUDA_CODE(CUDA_ERROR_DEVICE_UNAVAILABLE, 46) \
    CUDA_CODE(CUDA_ERROR_NO_DEVICE, 100) \
    CUDA_CODE(CUDA_ERROR_INVALID_DEVICE, 101) \
    CUDA_CODE(CUDA_ERROR_INVALID_IMAGE, 200) \
    CUDA_CODE(CUDA_ERROR_INVALID_CONTEXT, 201) \
    CUDA_CODE(CUDA_ERROR_MAP_FAILED, 205) \
    CUDA_CODE(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217) \
    CUDA_CODE(CUDA_ERROR_OPERATING_SYSTEM, 304) \
    CUDA_CODE(CUDA_ERROR_INVALID_HANDLE, 400) \
    CUDA_CODE(CUDA_ERROR_ILLEGAL_STATE, 401) \
    CUDA_CODE(CUDA_ERROR_NOT_FOUND, 500) \
    CUDA_CODE(CUDA_ERROR_NOT_READY, 600) \
    CUDA_CODE(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704) \
    CUDA_CODE(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, 705) \
    CUDA_CODE(CUDA_ERROR_NOT_PERMITTED, 800) \
    CUDA_CODE(CUDA_ERROR_NOT_SUPPORTED, 801) \
    CUDA_CODE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900) \
    CUDA_CODE(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901) \
    CUDA_CODE(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906) \
    CUDA_CODE(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908) \
    CUDA_CODE(CUDA_ERROR_UNKNOWN, 999)

enum {
#define CUDA_CODE(name, value) name = value,
    CUDA_CODES
#undef CUDA_CODE
};

typedef struct {
    uint8_t bytes[16];
} CUuuid;

enum {
    CU_MEM_LOCATION_TYPE_NONE = 0,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_LOCATION_TYPE_HOST = 2,
    CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
    CU_MEM_LOCATION_TYPE_INVISIBLE = 5,              /* this and the next: cuda.h 13.5 */
    CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN = 6,
};

typedef struct {
    int type;
    int id; /* for a locality domain: the device in the lowest byte, the domain in the next */
} CUmemLocation;

enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1, CU_MEM_ALLOCATION_TYPE_MANAGED = 2 /* cuda.h 13.0 */ };

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        uint8_t compressionType;
        uint8_t gpuDirectRDMACapable;
        uint16_t usage;
        uint8_t reserved[4];
    } allocFlags;
} CUmemAllocationProp;

enum { CU_MEM_HANDLE_TYPE_FABRIC = 8 }; /* a bit; cuda.h 12.3 */

typedef struct {
    CUmemLocation location;
    int flags; /* 0 none, 1 read, 3 read and write */
} CUmemAccessDesc;

typedef struct {
    int allocType;
    int handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    uint16_t usage;
    uint8_t reserved[54];
} CUmemPoolProps;

typedef struct {
    char reserved[64];
} CUipcMemHandle;

typedef struct {
    size_t Width;
    size_t Height;
    int Format; /* 1 to 3: unsigned 8, 16, 32 bit; 8 to 10: signed; 16: half; 32: float */
    unsigned NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct {
    size_t Width;
    size_t Height;
    size_t Depth;
    int Format;
    unsigned NumChannels;
    unsigned Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

enum { CU_GET_PROC_ADDRESS_LEGACY_STREAM = 1, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2 };
enum { CU_PROC_ADDRESS_FOUND = 0, CU_PROC_ADDRESS_NOT_FOUND = 1, CU_PROC_ADDRESS_TOO_OLD = 2 };

/* Checkpointing: CUDA 12.8 (lock, checkpoint, unlock), GPU pairs CUDA 13.0. */
typedef struct {
    unsigned timeoutMs;
    unsigned reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct {
    uint64_t reserved[8];
} CUcheckpointCheckpointArgs;

typedef struct {
    CUuuid oldUuid;
    CUuuid newUuid;
} CUcheckpointGpuPair;

typedef struct {
    CUcheckpointGpuPair *gpuPairs;
    unsigned gpuPairsCount;
    char reserved[52 - sizeof(CUcheckpointGpuPair *)];
    uint64_t reserved1;
} CUcheckpointRestoreArgs;

typedef struct {
    uint64_t reserved[8];
} CUcheckpointUnlockArgs;

_Static_assert(sizeof(CUcheckpointLockArgs) == 64, "ABI");
_Static_assert(sizeof(CUcheckpointRestoreArgs) == 64, "ABI");
_Static_assert(sizeof(CUmemAllocationProp) == 32, "ABI");
_Static_assert(sizeof(CUmemPoolProps) == 88, "ABI");

/* NVML */
typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct { /* nvmlFieldValue_t; `value` is a union of 8 bytes */
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    int valueType, nvmlReturn;
    union {
        unsigned uiVal;
        unsigned long long ullVal;
    } value;
} nvmlFieldValue_t;
_Static_assert(sizeof(nvmlFieldValue_t) == 40, "ABI");

typedef struct nvmlDevice_st *nvmlDevice_t;

enum { NVML_UUID_TEXT = 96 }; /* NVML_DEVICE_UUID_V2_BUFFER_SIZE */

#endif

/* The preload library's hooks of arrays: memory with a shape. */
#include "preload_account.h"

/* Bits of one element, by format (CUarray_format of cuda.h 13.5).  Formats with all planes or channels in
 * one element have the bits of all of them; the others have bits per channel. */
static const struct {
    uint8_t first, last, bits;
    bool has_all_channels;
} formats[] = {
    {0x01, 0x01, 8, false},  {0x08, 0x08, 8, false},                           /* 8 bit integers */
    {0x02, 0x02, 16, false}, {0x09, 0x09, 16, false}, {0x10, 0x10, 16, false}, /* 16 bit, half */
    {0x03, 0x03, 32, false}, {0x0a, 0x0a, 32, false}, {0x20, 0x20, 32, false}, /* 32 bit, float */
    {0x50, 0x50, 32, true},                                                    /* 10 10 10 2 */
    {0x51, 0x51, 16, true},  {0x52, 0x52, 32, true},  {0x53, 0x53, 12, true},  {0x54, 0x54, 24, true},
    {0x55, 0x55, 16, true},  {0x56, 0x56, 32, true},  {0x57, 0x57, 24, true},  {0x58, 0x58, 48, true},
    {0x59, 0x59, 12, true},  {0x5a, 0x5a, 24, true},  {0x5b, 0x5b, 16, true},  {0x5c, 0x5c, 32, true},
    {0x5d, 0x5d, 24, true},  {0x5e, 0x5e, 48, true},                           /* 4:2:0 12, 4:2:2 16, 4:4:4 24 */
    {0x91, 0x92, 4, true},   {0x97, 0x98, 4, true},                            /* BC1, BC4: 8 bytes for 16 */
    {0x93, 0x96, 8, true},   {0x99, 0x9e, 8, true},                            /* BC2, BC3, BC5 to BC7 */
    {0x9f, 0x9f, 24, true},  {0xa1, 0xa1, 24, true},  {0xb0, 0xb0, 12, true},  /* P010, P016, NV12 */
    {0xa2, 0xa2, 16, true},  {0xa3, 0xa4, 32, true},  {0xa5, 0xa5, 16, true},  /* NV16, P210, P216, YUY2 */
    {0xa6, 0xa9, 32, true},  {0xb1, 0xb1, 64, true},                           /* Y210 to Y410, Y416 */
    {0xb2, 0xb2, 24, true},  {0xb3, 0xb3, 48, true},  {0xb4, 0xb4, 24, true},  {0xb5, 0xb5, 48, true},
    {0xc0, 0xc0, 8, true},   {0xc1, 0xc1, 16, true},  {0xc2, 0xc2, 32, true},  /* UNORM_INT8X1, 2, 4 */
    {0xc3, 0xc3, 16, true},  {0xc4, 0xc4, 32, true},  {0xc5, 0xc5, 64, true},  /* UNORM_INT16X1, 2, 4 */
    {0xc6, 0xc6, 8, true},   {0xc7, 0xc7, 16, true},  {0xc8, 0xc8, 32, true},  /* SNORM_INT8X1, 2, 4 */
    {0xc9, 0xc9, 16, true},  {0xca, 0xca, 32, true},  {0xcb, 0xcb, 64, true},  /* SNORM_INT16X1, 2, 4 */
};

/* A format newer than the table is charged as the largest, because too much is better than too little. */
static uint64_t element_bits(int format, unsigned channels)
{
    channels = channels ? channels : 1;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (format >= formats[i].first && format <= formats[i].last)
            return formats[i].bits * (uint64_t)(formats[i].has_all_channels ? 1 : channels);
    return 32 * (uint64_t)(channels < 4 ? 4 : channels);
}

static uint64_t array_bytes(size_t width, size_t height, size_t depth, int format, unsigned channels)
{
    uint64_t bits = element_bits(format, channels);
    bool is_compressed = format >= 0x91 && format <= 0x9e; /* in blocks of 4 x 4 */
    if (is_compressed && width < SIZE_MAX - 3 && height < SIZE_MAX - 3) {
        width = (width + 3) / 4 * 4;
        height = (height + 3) / 4 * 4;
    }
    size_t sides[] = {width, height ? height : 1, depth ? depth : 1};
    for (int i = 0; i < 3; i++)
        if (__builtin_mul_overflow(bits, sides[i], &bits))
            return UINT64_MAX;
    return bits / 8 + (bits % 8 != 0);
}

/* A sparse array, or one with deferred mapping, takes no memory (cuda.h, CUDA_ARRAY3D_SPARSE and
 * CUDA_ARRAY3D_DEFERRED_MAPPING): cuMemCreate does. */
static uint64_t array3d_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    enum { SPARSE = 0x40, DEFERRED_MAPPING = 0x80 };
    if (!shape || shape->Flags & (SPARSE | DEFERRED_MAPPING))
        return 0;
    return array_bytes(shape->Width, shape->Height, shape->Depth, shape->Format, shape->NumChannels);
}

API CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    uint64_t bytes = shape ? array_bytes(shape->Width, shape->Height, 0, shape->Format, shape->NumChannels) : 0;
    ALLOCATE(cuArrayCreate_v2, -1, bytes, (uintptr_t)*out, real(out, shape));
}

API CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    ALLOCATE(cuArray3DCreate_v2, -1, array3d_bytes(shape), (uintptr_t)*out, real(out, shape));
}

/* Each level has a quarter of the one before, so all further levels have less than half of the first. */
API CUresult cuMipmappedArrayCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    uint64_t bytes = array3d_bytes(shape);
    if (levels > 1 && bytes <= UINT64_MAX / 2)
        bytes += bytes / 2;
    ALLOCATE(cuMipmappedArrayCreate, -1, bytes, (uintptr_t)*out, real(out, shape, levels));
}

API CUresult cuArrayDestroy(CUarray array)
{
    RELEASE(cuArrayDestroy, (uintptr_t)array, real(array));
}

API CUresult cuMipmappedArrayDestroy(CUarray array)
{
    RELEASE(cuMipmappedArrayDestroy, (uintptr_t)array, real(array));
}

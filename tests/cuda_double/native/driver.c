/* libcuda.so.1: what torch and PyNvVideoCodec ask of the driver itself. The rest is made by build.py, and refuses.
 *
 * The context of a device is its primary one, or a green one of green.c. Streams, events and memory are those of the
 * runtime. */
#include "driver.h"

#include <string.h>

#include "abi.h"
#include "runtime.h"

enum { MAX_CONTEXTS = 64, PITCH = 512 };
typedef unsigned long long device_pointer_t;

static __thread context_t pushed[MAX_CONTEXTS]; /* that were current before */
static __thread int num_pushed;

static int current_device(void)
{
    int device = 0;
    RUNTIME(cudaGetDevice, (int *), &device);
    return device;
}

static context_t context_of(int device) { return (context_t)(uintptr_t)(device + 1); }

static context_t current(void)
{
    context_t green = current_green();
    return green ? green : context_of(current_device());
}

static int make_current(context_t context)
{
    if (!context)
        return NOT_SUPPORTED; /* a thread of the double has always a context */
    return is_primary(context) ? RUNTIME(cudaSetDevice, (int), device_of(context)) : make_green_current(context);
}

API int cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }

API int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return CUDA_SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal)
{
    int count = 0;
    RUNTIME(cudaGetDeviceCount, (int *), &count);
    if (ordinal < 0 || ordinal >= count)
        return INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API int cuDeviceGetCount(int *count) { return RUNTIME(cudaGetDeviceCount, (int *), count); }

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    (void)device;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

API int cuDevicePrimaryCtxRetain(context_t *context, int device)
{
    int count = 0;
    RUNTIME(cudaGetDeviceCount, (int *), &count);
    if (device < 0 || device >= count)
        return INVALID_DEVICE;
    *context = context_of(device);
    return CUDA_SUCCESS;
}

API int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, CUDA_SUCCESS; }

API int cuCtxCreate_v2(context_t *context, unsigned flags, int device)
{
    (void)flags;
    return cuDevicePrimaryCtxRetain(context, device);
}

API int cuCtxDestroy_v2(context_t context) { return (void)context, CUDA_SUCCESS; }

API int cuCtxGetCurrent(context_t *context)
{
    *context = current();
    return CUDA_SUCCESS;
}

API int cuCtxSetCurrent(context_t context) { return make_current(context); }
API int cuCtxSynchronize(void) { return RUNTIME(cudaDeviceSynchronize, (void)); }

API int cuCtxGetDevice(int *device)
{
    *device = current_device();
    return CUDA_SUCCESS;
}

API int cuCtxPushCurrent_v2(context_t context)
{
    if (!context || num_pushed == MAX_CONTEXTS)
        return INVALID_CONTEXT;
    context_t before = current();
    int error = make_current(context);
    if (!error)
        pushed[num_pushed++] = before;
    return error;
}

API int cuCtxPopCurrent_v2(context_t *context)
{
    if (!num_pushed)
        return INVALID_CONTEXT;
    if (context)
        *context = current();
    return make_current(pushed[--num_pushed]);
}

/* ---- streams and events ---- */

API int cuStreamGetCtx(struct stream *stream, context_t *context)
{
    *context = context_of((uintptr_t)stream <= 2 ? current_device() : stream->device);
    return CUDA_SUCCESS;
}

API int cuStreamCreate(struct stream **stream, unsigned flags)
{
    return RUNTIME(cudaStreamCreateWithFlags, (struct stream **, unsigned), stream, flags);
}

API int cuStreamDestroy_v2(struct stream *stream) { return RUNTIME(cudaStreamDestroy, (struct stream *), stream); }

API int cuStreamSynchronize(struct stream *stream) { return RUNTIME(cudaStreamSynchronize, (struct stream *), stream); }

API int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags)
{
    return RUNTIME(cudaStreamWaitEvent, (struct stream *, struct event *, unsigned), stream, event, flags);
}

API int cuEventCreate(struct event **event, unsigned flags)
{
    return RUNTIME(cudaEventCreateWithFlags, (struct event **, unsigned), event, flags);
}

API int cuEventDestroy_v2(struct event *event) { return RUNTIME(cudaEventDestroy, (struct event *), event); }

API int cuEventRecord(struct event *event, struct stream *stream)
{
    return RUNTIME(cudaEventRecord, (struct event *, struct stream *), event, stream);
}

API int cuEventSynchronize(struct event *event) { return RUNTIME(cudaEventSynchronize, (struct event *), event); }

/* ---- memory ---- */

API int cuMemAlloc_v2(device_pointer_t *address, size_t size)
{
    return RUNTIME(cudaMalloc, (void **, size_t), (void **)address, size);
}

API int cuMemAllocPitch_v2(device_pointer_t *address, size_t *pitch, size_t width, size_t height, unsigned element)
{
    (void)element;
    *pitch = (width + PITCH - 1) / PITCH * PITCH;
    return cuMemAlloc_v2(address, *pitch * height);
}

API int cuMemFree_v2(device_pointer_t address) { return RUNTIME(cudaFree, (void *), (void *)address); }

API int cuMemAllocAsync(device_pointer_t *address, size_t size, struct stream *stream)
{
    (void)stream;
    return cuMemAlloc_v2(address, size);
}

API int cuMemFreeAsync(device_pointer_t address, struct stream *stream)
{
    (void)stream; /* waits for all work of the device, as the runtime does */
    return cuMemFree_v2(address);
}

API int cuMemcpyHtoD_v2(device_pointer_t to, const void *from, size_t size)
{
    return RUNTIME(cudaMemcpy, (void *, const void *, size_t, int), (void *)to, from, size, 1);
}

API int cuMemcpyDtoH_v2(void *to, device_pointer_t from, size_t size)
{
    return RUNTIME(cudaMemcpy, (void *, const void *, size_t, int), to, (void *)from, size, 2);
}

API int cuMemcpyDtoHAsync_v2(void *to, device_pointer_t from, size_t size, struct stream *stream)
{
    return RUNTIME(cudaMemcpyAsync, (void *, const void *, size_t, int, struct stream *), to, (void *)from, size, 2,
                   stream);
}

struct rows { /* CUDA_MEMCPY2D */
    size_t from_x, from_y;
    unsigned from_type;
    const void *from_host;
    device_pointer_t from_device;
    void *from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    unsigned to_type;
    void *to_host;
    device_pointer_t to_device;
    void *to_array;
    size_t to_pitch;
    size_t width, height;
};
enum { ON_DEVICE = 2 }; /* CU_MEMORYTYPE_DEVICE */

/* Runs in the thread of the stream, as a kernel. */
static int copy_rows(long ticket, void **content)
{
    struct rows *rows = (struct rows *)ticket;
    if (content)
        for (size_t row = 0; row < rows->height; row++)
            memcpy((char *)content[1] + row * rows->to_pitch, (char *)content[0] + row * rows->from_pitch, rows->width);
    free(rows);
    return 0;
}

API int cuMemcpy2DAsync_v2(const struct rows *rows, struct stream *stream)
{
    if (rows->from_type != ON_DEVICE || rows->to_type != ON_DEVICE)
        return NOT_SUPPORTED; /* frames stay in the memory of the device here */
    if (!rows->height || !rows->width)
        return CUDA_SUCCESS;
    struct rows *kept = malloc(sizeof *kept);
    *kept = *rows;
    void *addresses[] = {(char *)rows->from_device + rows->from_y * rows->from_pitch + rows->from_x,
                         (char *)rows->to_device + rows->to_y * rows->to_pitch + rows->to_x};
    size_t sizes[] = {(rows->height - 1) * rows->from_pitch + rows->width,
                      (rows->height - 1) * rows->to_pitch + rows->width};
    int error = RUNTIME(cuda_double_launch, (struct stream *, kernel_t, long, int, void **, const size_t *), stream,
                        copy_rows, (long)kept, 2, addresses, sizes);
    if (error)
        free(kept);
    return error;
}

API int cuMemcpy2D_v2(const struct rows *rows)
{
    int error = cuMemcpy2DAsync_v2(rows, NULL);
    return error ? error : cuStreamSynchronize(NULL);
}

API int cuPointerGetAttribute(void *data, int attribute, device_pointer_t address)
{
    enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, ORDINAL = 9, HOST = 1 };
    struct cudaPointerAttributes found;
    int error = RUNTIME(cudaPointerGetAttributes, (void *, const void *), &found, (void *)address);
    if (error || !found.type)
        return error ? error : INVALID_VALUE;
    if (attribute == CONTEXT)
        *(context_t *)data = context_of(found.device);
    else if (attribute == MEMORY_TYPE)
        *(unsigned *)data = found.type == ON_DEVICE ? ON_DEVICE : HOST;
    else if (attribute == DEVICE_POINTER)
        *(device_pointer_t *)data = address;
    else if (attribute == ORDINAL)
        *(int *)data = found.device;
    else
        return NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

static const struct {
    int error;
    const char *name, *text;
} words[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CONTEXT_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "the CUDA double has no such operation of the driver"},
    {INVALID_RESOURCE_TYPE, "CUDA_ERROR_INVALID_RESOURCE_TYPE", "invalid resource type"},
    {INVALID_RESOURCE_CONFIGURATION, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "invalid resource configuration"},
    {STREAM_DETACHED, "CUDA_ERROR_STREAM_DETACHED", "the stream is detached: its green context was destroyed"},
};

API int cuGetErrorName(int error, const char **text)
{
    *text = "CUDA_ERROR_UNKNOWN";
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].error == error)
            *text = words[i].name;
    return CUDA_SUCCESS;
}

API int cuGetErrorString(int error, const char **text)
{
    *text = "unknown error";
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].error == error)
            *text = words[i].text;
    return CUDA_SUCCESS;
}

/* Return a function in the newest form that this driver has: all of them are older than what asks by name. */
API int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status)
{
    enum { FOUND = 0, MISSING = 1 };
    static void *library;
    char newer[128];
    (void)version, (void)flags;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    snprintf(newer, sizeof newer, "%s_v2", name);
    if (!(*function = dlsym(library, newer)))
        *function = dlsym(library, name);
    if (status)
        *status = *function ? FOUND : MISSING;
    return *function ? CUDA_SUCCESS : NOT_FOUND;
}

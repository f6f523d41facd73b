/* Devices, errors and settings. */
#include "double.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "abi.h"

pthread_mutex_t world = PTHREAD_MUTEX_INITIALIZER;
struct device devices[MAX_DEVICES];
int num_devices;
struct counts counts;
size_t memory_bound;
static int num_sms;
bool held, ending;
__thread int here;
__thread struct context *green_here;
static pid_t home;
static __thread cudaError_t last;
static __thread char refused_kernel[512];

long setting(const char *name, long usual)
{
    const char *value = getenv(name);
    return value && *value ? atol(value) : usual;
}

/* Devices of this process: those of the host that CUDA_VISIBLE_DEVICES names, in its order. */
static void find_devices(void)
{
    long present = setting("CUDA_DOUBLE_DEVICES", 2);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    memory_bound = (size_t)setting("CUDA_DOUBLE_MEMORY", 256L << 20);
    num_sms = (int)setting("CUDA_DOUBLE_SMS", 132); /* of an H100 */
    if (present > MAX_DEVICES)
        present = MAX_DEVICES;
    if (!visible) {
        for (num_devices = 0; num_devices < present; num_devices++)
            devices[num_devices].number = num_devices;
    } else {
        char *names = strdup(visible), *rest = names, *name;
        while ((name = strsep(&rest, ",")) && *name >= '0' && *name <= '9' && atol(name) < present &&
               num_devices < MAX_DEVICES)
            devices[num_devices++].number = atoi(name);
        free(names);
    }
    for (int i = 0; i < num_devices; i++) {
        devices[i].legacy = (struct stream){.device = i, .alive = true};
        devices[i].legacy.random = (uint64_t)setting("CUDA_DOUBLE_SEED", 1) * 7919 + (uint64_t)i + 1;
    }
}

cudaError_t said(cudaError_t error)
{
    if (error)
        last = error;
    return error;
}

cudaError_t enter(void)
{
    if (home && home != getpid()) /* as CUDA does in a child of a fork */
        return said(INITIALIZATION);
    pthread_mutex_lock(&world);
    if (!home) {
        home = getpid();
        find_devices();
    }
    if (!num_devices) {
        pthread_mutex_unlock(&world);
        return said(NO_DEVICE);
    }
    return SUCCESS;
}

cudaError_t leave(cudaError_t error)
{
    pthread_mutex_unlock(&world);
    return said(error);
}

cudaError_t state_of(int device)
{
    return device < 0 || device >= num_devices ? INVALID_DEVICE : devices[device].broken;
}

/* Kernels are Python functions in the threads of streams: who waits for a stream must not keep Python to itself. */
void *free_python(void)
{
    static int (*is_held)(void);
    static void *(*save)(void);
    if (!is_held) {
        save = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
        is_held = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    }
    return is_held && save && is_held() ? save() : NULL;
}

void take_python(void *state)
{
    static void (*restore)(void *);
    if (!restore)
        restore = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    if (state)
        restore(state);
}

API cudaError_t cudaGetDeviceCount(int *count)
{
    cudaError_t error = enter();
    *count = error ? 0 : num_devices;
    return error ? error : leave(SUCCESS);
}

API cudaError_t cudaGetDevice(int *device)
{
    *device = here;
    return SUCCESS;
}

API cudaError_t cudaSetDevice(int device)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if (device < 0 || device >= num_devices)
        return leave(INVALID_DEVICE);
    here = device; /* a broken device may be current: its next operation reports the error */
    green_here = NULL;
    return leave(SUCCESS);
}

API cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return SUCCESS;
}

API cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return SUCCESS;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if (device < 0 || device >= num_devices)
        return leave(INVALID_DEVICE);
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "CUDA double %d", devices[device].number);
    memcpy(found->uuid, "cuda-double-uuid", 16);
    found->uuid[15] = (char)('0' + devices[device].number);
    found->totalGlobalMem = memory_bound;
    found->sharedMemPerBlock = found->sharedMemPerMultiprocessor = found->sharedMemPerBlockOptin = 48 << 10;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = found->maxThreadsDim[2] = 1024;
    found->maxGridSize[0] = found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = 2048;
    found->multiProcessorCount = num_sms;
    found->major = 9;
    found->pciBusID = devices[device].number + 1;
    found->asyncEngineCount = 2;
    found->unifiedAddressing = found->concurrentKernels = found->streamPrioritiesSupported = found->ipcEventSupported =
        found->canMapHostMemory = found->hostRegisterSupported = 1;
    return leave(SUCCESS);
}

API cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    enum { MAJOR = 75, MINOR = 76, MULTIPROCESSORS = 16, THREADS_PER_BLOCK = 1 };
    cudaError_t error = enter();
    (void)device;
    if (error)
        return error;
    *value = attribute == MAJOR               ? 9
             : attribute == MULTIPROCESSORS   ? num_sms
             : attribute == THREADS_PER_BLOCK ? 1024
                                              : 0;
    return leave(SUCCESS);
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device)
{
    snprintf(text, (size_t)size, "0000:%02x:00.0", devices[device].number + 1);
    return SUCCESS;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest)
{
    *lowest = 0;
    *highest = -5;
    return SUCCESS;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = device != peer && setting("CUDA_DOUBLE_PEERS", 1);
    return SUCCESS;
}

API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    cudaError_t error = enter();
    (void)flags;
    if (error)
        return error;
    if (peer < 0 || peer >= num_devices)
        return leave(INVALID_DEVICE);
    if (peer == here || !setting("CUDA_DOUBLE_PEERS", 1))
        return leave(PEER_UNSUPPORTED);
    if (devices[here].peers[peer])
        return leave(PEER_ALREADY_ENABLED);
    devices[here].peers[peer] = true;
    return leave(SUCCESS);
}

API cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last;
    last = SUCCESS;
    return error ? error : here < num_devices ? devices[here].broken : SUCCESS;
}

API cudaError_t cudaPeekAtLastError(void)
{
    return last ? last : here < num_devices ? devices[here].broken : SUCCESS;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} words[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INITIALIZATION, "cudaErrorInitializationError", "initialization error"},
    {INVALID_FUNCTION, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_CONTEXT, "cudaErrorDeviceUninitialized", "invalid device context"},
    {MAP_FAILED, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"},
    {PEER_UNSUPPORTED, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {ILLEGAL_ADDRESS, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {PEER_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {ALREADY_PINNED, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the memory is already pinned"},
    {NOT_PINNED, "cudaErrorHostMemoryNotRegistered", "the memory is not pinned"},
    {CONTEXT_DESTROYED, "cudaErrorContextIsDestroyed", "context is destroyed"},
    {DEVICE_ASSERT, "cudaErrorAssert", "device-side assert triggered"},
    {STREAM_DETACHED, "cudaErrorStreamDetached", "the stream is detached: its green context was destroyed"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "the CUDA double has no such operation"},
};

API const char *cudaGetErrorName(cudaError_t error)
{
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].error == error)
            return words[i].name;
    return "unrecognized error code";
}

API const char *cudaGetErrorString(cudaError_t error)
{
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].error == error)
            return words[i].error == INVALID_FUNCTION ? refused_kernel : words[i].text;
    return "unrecognized error code";
}

/* Kernels of torch: all are known by name, and none is run. */
static struct {
    const void *function;
    const char *name;
} *known;
static size_t num_known, room_for;

API void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle[4];
    (void)binary;
    return handle;
}

API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
API void __cudaRegisterVar(void) {}

API void __cudaRegisterFunction(void **handle, const void *function, char *device_function, const char *name)
{
    (void)handle, (void)device_function;
    pthread_mutex_lock(&world);
    if (num_known == room_for) {
        room_for = room_for ? 2 * room_for : 1024;
        known = realloc(known, room_for * sizeof *known);
    }
    known[num_known].function = function;
    known[num_known++].name = name;
    pthread_mutex_unlock(&world);
}

static cudaError_t refuse(const void *function)
{
    const char *name = "that was compiled at run time";
    for (size_t i = 0; i < num_known; i++)
        if (known[i].function == function)
            name = known[i].name;
    counts.refused++;
    snprintf(refused_kernel, sizeof refused_kernel,
             "the CUDA double does not run the kernel %.300s; give its operation to tests/cuda_double/kernels.py", name);
    return said(INVALID_FUNCTION);
}

API cudaError_t cudaLaunchKernel(const void *function) { return refuse(function); }
API cudaError_t cudaLaunchKernelExC(const void *config, const void *function) { return (void)config, refuse(function); }
API cudaError_t cudaLaunchCooperativeKernel(const void *function) { return refuse(function); }
API cudaError_t __cudaLaunchKernel(const void *kernel) { return refuse(kernel); }
API cudaError_t __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, SUCCESS; }
API cudaError_t __cudaPushCallConfiguration(void) { return SUCCESS; }
API cudaError_t __cudaPopCallConfiguration(void) { return SUCCESS; }

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function)
{
    (void)function;
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    return SUCCESS;
}

API cudaError_t cudaFuncSetAttribute(void) { return SUCCESS; }
API cudaError_t cudaKernelSetAttributeForDevice(void) { return SUCCESS; }

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks)
{
    *blocks = 4;
    return SUCCESS;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks)
{
    *blocks = 4;
    return SUCCESS;
}

static cudaError_t refuse_driver(void) { return NOT_SUPPORTED; }

/* torch stops if it does not find all functions of the driver that it knows. What is not loaded refuses. */
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                 unsigned long long flags, int *status)
{
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function)
        *function = (void *)refuse_driver;
    if (status)
        *status = 0;
    return SUCCESS;
}

API cudaError_t cudaProfilerStart(void) { return SUCCESS; }
API cudaError_t cudaProfilerStop(void) { return SUCCESS; }

/* What tests set and read, by tests/cuda_double/control.py. */

API void cuda_double_counts(struct counts *found)
{
    pthread_mutex_lock(&world);
    *found = counts;
    pthread_mutex_unlock(&world);
}

/* Forget the error of every device and the access that it has to others, and let all that is held go on. */
API void cuda_double_mend(void)
{
    pthread_mutex_lock(&world);
    for (int i = 0; i < num_devices; i++) {
        devices[i].broken = SUCCESS;
        memset(devices[i].peers, 0, sizeof devices[i].peers);
        devices[i].legacy.held = false;
    }
    for (int i = 0; i < num_streams; i++)
        streams[i]->held = false;
    held = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&world);
    last = SUCCESS;
}

/* No operation begins from here on, in all streams, or goes on. */
API void cuda_double_hold_all(int whether)
{
    pthread_mutex_lock(&world);
    held = whether;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&world);
}

API int cuda_double_hold(struct stream *handle, int whether)
{
    cudaError_t error = enter();
    struct stream *stream;
    if (error)
        return error;
    if (!(stream = stream_of(handle)))
        return leave(why_unusable(handle));
    stream->held = whether;
    pthread_cond_broadcast(&changed);
    return leave(SUCCESS);
}

/* The process ends: nobody waits for a device any more, and no kernel calls Python. */
API void cuda_double_end(void)
{
    pthread_mutex_lock(&world);
    ending = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&world);
}

API void cuda_double_set_memory_bound(size_t bytes)
{
    if (enter())
        return;
    memory_bound = bytes;
    leave(SUCCESS);
}

API void cuda_double_set_multiprocessors(int count)
{
    if (enter())
        return;
    num_sms = count;
    leave(SUCCESS);
}

/* Green contexts: parts of the multiprocessors of a device, by count, and streams of their own.
 *
 * Counts and errors are those that NVIDIA documents for compute capability 9.0. A part is a number and nothing more:
 * kernels run as those of any other stream do. What the documentation leaves open is refused. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

#include "runtime.h"

enum { LEAST = 8, GRANULARITY = 8 }; /* multiprocessors of a part */
enum { MULTIPROCESSORS = 1 };        /* CU_DEV_RESOURCE_TYPE_SM, the only one that CUDA 13.0 has */
enum { DEFAULT_STREAM = 1 };         /* CU_GREEN_CTX_DEFAULT_STREAM */
enum { COUNT = 16 };                 /* cudaDevAttrMultiProcessorCount */

struct resource { /* CUdevResource */
    unsigned type;
    int device;     /* from here on inside the padding of the interface */
    unsigned split; /* which split it comes from; 0: it may be split */
    unsigned char padding[84];
    struct {
        unsigned count, least, granularity, flags;
    } sm;
    unsigned char others[24];
    void *next;
};
_Static_assert(sizeof(struct resource) == 144 && offsetof(struct resource, sm) == 96, "as the interface fixes it");

struct description {
    int device;
    unsigned count;
};

static struct resource resource_of(int device, unsigned count)
{
    return (struct resource){
        .type = MULTIPROCESSORS, .device = device, .sm = {.count = count, .least = LEAST, .granularity = GRANULARITY}};
}

API int cuDeviceGetDevResource(int device, struct resource *resource, int type)
{
    int count = 0, devices_here = 0;
    RUNTIME(cudaGetDeviceCount, (int *), &devices_here);
    if (device < 0 || device >= devices_here)
        return INVALID_DEVICE;
    if (type != MULTIPROCESSORS)
        return INVALID_RESOURCE_TYPE;
    int error = RUNTIME(cudaDeviceGetAttribute, (int *, int, int), &count, COUNT, device);
    if (!error)
        *resource = resource_of(device, (unsigned)count);
    return error;
}

API int cuDevSmResourceSplitByCount(struct resource *parts, unsigned *num_parts, const struct resource *whole,
                                    struct resource *rest, unsigned flags, unsigned least)
{
    static _Atomic unsigned splits;
    if (!num_parts || !whole || least > whole->sm.count)
        return INVALID_VALUE;
    if (whole->type != MULTIPROCESSORS)
        return INVALID_RESOURCE_TYPE;
    if (whole->split) /* it first has to become a context */
        return INVALID_RESOURCE_CONFIGURATION;
    if (flags)
        return NOT_SUPPORTED;
    unsigned size = least < LEAST ? LEAST : (least + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    unsigned found = whole->sm.count / size, split = ++splits;
    if (parts && found > *num_parts)
        found = *num_parts;
    *num_parts = found;
    for (unsigned i = 0; parts && i < found; i++) {
        parts[i] = resource_of(whole->device, size);
        parts[i].split = split;
    }
    if (rest) {
        *rest = (struct resource){0};
        if (whole->sm.count > found * size) {
            *rest = resource_of(whole->device, whole->sm.count - found * size);
            rest->split = split;
        }
    }
    return CUDA_SUCCESS;
}

API int cuDevResourceGenerateDesc(struct description **made, struct resource *resources, unsigned num_resources)
{
    if (!made || !resources || !num_resources)
        return INVALID_VALUE;
    unsigned count = 0;
    for (unsigned i = 0; i < num_resources; i++) {
        if (resources[i].type != MULTIPROCESSORS)
            return INVALID_RESOURCE_TYPE;
        if (resources[i].device != resources->device || (i && resources[i].split != resources->split))
            return INVALID_RESOURCE_CONFIGURATION;
        count += resources[i].sm.count;
    }
    *made = malloc(sizeof **made); /* the interface has nothing that would free it */
    **made = (struct description){resources->device, count};
    return CUDA_SUCCESS;
}

API int cuGreenCtxCreate(context_t *made, const struct description *description, int device, unsigned flags)
{
    if (!made || !description || flags != DEFAULT_STREAM)
        return INVALID_VALUE;
    if (device != description->device)
        return INVALID_DEVICE;
    return RUNTIME(cuda_double_context_create, (context_t *, int, unsigned), made, device, description->count);
}

API int cuGreenCtxDestroy(context_t context) { return RUNTIME(cuda_double_context_destroy, (context_t), context); }

/* A green context, and what it is as a context, have one handle. */
API int cuCtxFromGreenCtx(context_t *context, context_t green)
{
    int device;
    unsigned count;
    int error = RUNTIME(cuda_double_context_get, (context_t, int *, unsigned *), green, &device, &count);
    if (!error)
        *context = green;
    return error;
}

API int cuGreenCtxGetDevResource(context_t green, struct resource *resource, int type)
{
    int device;
    unsigned count;
    int error = RUNTIME(cuda_double_context_get, (context_t, int *, unsigned *), green, &device, &count);
    if (error || type != MULTIPROCESSORS)
        return error ? error : INVALID_RESOURCE_TYPE;
    *resource = resource_of(device, count);
    return CUDA_SUCCESS;
}

API int cuCtxGetDevResource(context_t context, struct resource *resource, int type)
{
    return is_primary(context) ? cuDeviceGetDevResource(device_of(context), resource, type)
                               : cuGreenCtxGetDevResource(context, resource, type);
}

API int cuGreenCtxStreamCreate(struct stream **made, context_t green, unsigned flags, int priority)
{
    if (flags != NON_BLOCKING)
        return INVALID_VALUE;
    return RUNTIME(cuda_double_context_stream, (struct stream **, context_t, unsigned, int), made, green, flags,
                   priority);
}

API int cuStreamGetGreenCtx(struct stream *stream, context_t *green)
{
    return RUNTIME(cuda_double_context_of, (struct stream *, context_t *), stream, green);
}

context_t current_green(void)
{
    static context_t (*get)(void);
    if (!get)
        get = (context_t(*)(void))of_runtime("cuda_double_context_current");
    return get();
}

int make_green_current(context_t green) { return RUNTIME(cuda_double_context_set_current, (context_t), green); }

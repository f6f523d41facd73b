/* Green contexts, as the driver makes them: green.c has what the driver is asked, with the counts of multiprocessors. */
#include "double.h"

#include <stdlib.h>

static struct context *contexts; /* not freed, so that a handle of a destroyed one is known as such */

cudaError_t state_of_context(struct context *context)
{
    if (!context)
        return SUCCESS;
    for (struct context *one = contexts; one; one = one->next)
        if (one == context)
            return context->alive ? SUCCESS : CONTEXT_DESTROYED;
    return INVALID_CONTEXT;
}

API cudaError_t cuda_double_context_create(struct context **made, int device, unsigned num_sms)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if ((error = state_of(device)))
        return leave(error);
    struct context *context = malloc(sizeof *context);
    *context = (struct context){.device = device, .num_sms = num_sms, .alive = true, .next = contexts};
    if (!(context->own = make_stream(device, context, 0, 0))) {
        free(context);
        return leave(OUT_OF_MEMORY);
    }
    *made = contexts = context;
    return leave(SUCCESS);
}

/* Work that its streams have is done. They are not destroyed, but nothing else can be done with them. */
API cudaError_t cuda_double_context_destroy(struct context *context)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if (!context || (error = state_of_context(context)))
        return leave(context ? error : INVALID_CONTEXT);
    context->alive = false;
    return leave(SUCCESS);
}

API cudaError_t cuda_double_context_get(struct context *context, int *device, unsigned *num_sms)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if (!context || (error = state_of_context(context)))
        return leave(context ? error : INVALID_CONTEXT);
    *device = context->device;
    *num_sms = context->num_sms;
    return leave(SUCCESS);
}

API cudaError_t cuda_double_context_stream(struct stream **made, struct context *context, unsigned flags, int priority)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if (!context || (error = state_of_context(context)))
        return leave(context ? error : INVALID_CONTEXT);
    if ((error = state_of(context->device)))
        return leave(error);
    struct stream *stream = make_stream(context->device, context, flags, priority);
    if (stream)
        *made = stream;
    return leave(stream ? SUCCESS : OUT_OF_MEMORY);
}

/* Return the green context of a stream, or NULL. */
API cudaError_t cuda_double_context_of(struct stream *handle, struct context **context)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct stream *stream = stream_of(handle);
    if (stream)
        *context = stream->context;
    return leave(stream ? SUCCESS : why_unusable(handle));
}

API cudaError_t cuda_double_context_set_current(struct context *context)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if (!context || (error = state_of_context(context)))
        return leave(context ? error : INVALID_CONTEXT);
    here = context->device;
    green_here = context;
    return leave(SUCCESS);
}

API struct context *cuda_double_context_current(void) { return green_here; }

/* Streams, each a queue with a thread of its own, and events. */
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"

#define POLL_MICROSECONDS 200 /* for events of other processes, which cannot wake anybody here */
enum { TO_DEVICE = 1, TO_HOST = 2 };
enum { NO_TIMING = 2, BETWEEN_PROCESSES = 4 };

pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
struct stream *streams[MAX_STREAMS];
int num_streams;
static struct event *events;

double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void wait_a_little(long microseconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += microseconds * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&changed, &world, &until);
}

/* ---- recordings of events ---- */

void let_go(struct mark *mark)
{
    if (mark && !--mark->refs)
        free(mark);
}

bool is_reached(struct mark *mark)
{
    if (!mark || mark->reached)
        return true;
    if (!mark->shared)
        return false;
    if (mark->shared->reached >= mark->generation)
        return true;
    return kill(mark->shared->owner, 0) && errno == ESRCH; /* who is gone has no device any more */
}

static struct mark *new_mark(struct event *event)
{
    struct mark *mark = calloc(1, sizeof *mark);
    mark->refs = 2; /* the event's, and that of the operation */
    mark->shared = event->shared;
    mark->generation = event->shared ? ++event->shared->recorded : 0;
    let_go(event->latest);
    return event->latest = mark;
}

/* Return what a waiter waits for: the last recording at this time; NULL if there is none. */
static struct mark *latest(struct event *event)
{
    if (event->imported && event->shared->recorded) {
        struct mark *mark = calloc(1, sizeof *mark);
        mark->refs = 1;
        mark->shared = event->shared;
        mark->generation = event->shared->recorded;
        return mark;
    }
    if (event->latest)
        event->latest->refs++;
    return event->latest;
}

/* ---- queues ---- */

static bool is_default(struct stream *handle) { return (uintptr_t)handle <= 2; }

static struct stream *default_of(int device, struct context *context)
{
    return context ? context->own : &devices[device].legacy;
}

/* Return a stream that was not destroyed, or NULL. */
static struct stream *known(struct stream *handle)
{
    if (is_default(handle))
        return default_of(here, green_here);
    for (int i = 0; i < num_streams; i++)
        if (streams[i] == handle)
            return handle->alive ? handle : NULL;
    return NULL;
}

struct stream *stream_of(struct stream *handle)
{
    struct stream *stream = known(handle);
    return stream && (!stream->context || stream->context->alive) ? stream : NULL;
}

cudaError_t why_unusable(struct stream *handle)
{
    return !known(handle) ? INVALID_HANDLE : is_default(handle) ? CONTEXT_DESTROYED : STREAM_DETACHED;
}

struct op *new_op(enum verb verb)
{
    struct op *op = calloc(1, sizeof *op);
    op->verb = verb;
    return op;
}

static bool is_ready(struct op *op)
{
    for (int i = 0; i < op->num_dependencies; i++)
        if (op->dependencies[i].stream->done < op->dependencies[i].number)
            return false;
    return op->verb != WAIT || is_reached(op->mark);
}

/* Whether nothing but its turn keeps the next kernel of a stream, whatever its thread has seen of that by now. */
static bool wants_engine(struct stream *stream)
{
    struct op *op = stream->head;
    while (op && (op->verb == RECORD || op->verb == WAIT) && is_ready(op))
        op = op->next;
    return op && op->verb == KERNEL && is_ready(op) && !stream->held;
}

/* One kernel runs at a time on a device; of the streams that wait, that of the highest priority is next. */
static bool gets_engine(struct stream *stream)
{
    if (devices[stream->device].engine_busy)
        return false;
    for (int i = 0; i < num_streams; i++)
        if (streams[i]->device == stream->device && streams[i]->priority < stream->priority &&
            wants_engine(streams[i]))
            return false;
    return true;
}

/* A delay that depends on the seed and the stream alone: mostly short, now and then four times as long. */
static void delay(struct stream *stream)
{
    long most = setting("CUDA_DOUBLE_DELAY_US", 500);
    stream->random ^= stream->random << 13;
    stream->random ^= stream->random >> 7;
    stream->random ^= stream->random << 17;
    if (most > 0 && !ending)
        usleep((useconds_t)(stream->random % (uint64_t)most) * (stream->random >> 32 & 7 ? 1 : 4));
}

static void done_with(struct block *block)
{
    if (block)
        block->users--;
}

/* Copy or fill in two parts, with a delay between; the world is locked before and after. */
static cudaError_t move(struct stream *stream, struct op *op)
{
    struct block *to_block, *from_block = NULL;
    char *to = memory_at(op->to, stream->device, false, &to_block), *from = op->staged;
    if (op->verb == COPY && !from)
        from = memory_at(op->from, stream->device, false, &from_block);
    bool unpinned = (op->to_pinned && !block_at(op->to.address)) || (op->from_pinned && !block_at(op->from.address));
    if (!to || (op->verb == COPY && !from) || unpinned) {
        done_with(to_block);
        done_with(from_block);
        return ILLEGAL_ADDRESS;
    }
    size_t half = op->to.size / 2, rest = op->to.size - half;
    pthread_mutex_unlock(&world);
    delay(stream);
    if (op->verb == COPY) {
        memmove(to, from, half);
        delay(stream);
        memmove(to + half, from + half, rest);
    } else {
        memset(to, op->value, half);
        delay(stream);
        memset(to + half, op->value, rest);
    }
    pthread_mutex_lock(&world);
    done_with(to_block);
    done_with(from_block);
    return SUCCESS;
}

static cudaError_t run_kernel(struct stream *stream, struct op *op)
{
    void *content[MAX_RANGES];
    struct block *used[MAX_RANGES] = {NULL};
    bool is_legal = !devices[stream->device].broken;
    for (int i = 0; i < op->num_ranges && is_legal; i++) {
        content[i] = op->ranges[i].address;
        is_legal = !op->ranges[i].size ||
                   (content[i] = memory_at(op->ranges[i], stream->device, true, &used[i]));
    }
    struct device *device = &devices[stream->device];
    while (!ending && !gets_engine(stream))
        pthread_cond_wait(&changed, &world);
    device->engine_busy = true;
    pthread_mutex_unlock(&world);
    delay(stream);
    int failed = ending ? 0 : op->kernel(op->ticket, is_legal ? content : NULL);
    pthread_mutex_lock(&world);
    device->engine_busy = false;
    for (int i = 0; i < op->num_ranges; i++)
        done_with(used[i]);
    return !is_legal ? ILLEGAL_ADDRESS : failed ? DEVICE_ASSERT : SUCCESS;
}

static void run(struct stream *stream, struct op *op)
{
    struct device *device = &devices[stream->device];
    cudaError_t error = SUCCESS;
    switch (op->verb) {
    case COPY:
    case FILL:
        if (!device->broken && op->to.size)
            error = move(stream, op);
        break;
    case KERNEL:
        error = run_kernel(stream, op);
        break;
    case CALL:
        pthread_mutex_unlock(&world);
        op->call(op->argument);
        pthread_mutex_lock(&world);
        break;
    case RECORD:
        op->mark->at = now_ms();
        op->mark->reached = true;
        if (op->mark->shared && op->mark->shared->reached < op->mark->generation)
            op->mark->shared->reached = op->mark->generation;
        break;
    case WAIT:
        break;
    }
    if (error && !device->broken)
        device->broken = error;
}

static void *work(void *argument)
{
    struct stream *stream = argument;
    pthread_mutex_lock(&world);
    while (stream->alive || stream->head) {
        struct op *op = stream->head;
        if (!op || held || stream->held) {
            pthread_cond_wait(&changed, &world);
            continue;
        }
        if (!is_ready(op)) {
            if (op->verb == WAIT && op->mark->shared)
                wait_a_little(POLL_MICROSECONDS);
            else
                pthread_cond_wait(&changed, &world);
            continue;
        }
        run(stream, op);
        if (!(stream->head = op->next))
            stream->tail = NULL;
        stream->done = op->number;
        let_go(op->mark);
        free(op->staged);
        free(op->dependencies);
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&world);
    return NULL;
}

static void depend(struct op *op, struct stream *on)
{
    if (on->done == on->issued)
        return;
    op->dependencies = realloc(op->dependencies, (size_t)(op->num_dependencies + 1) * sizeof *op->dependencies);
    op->dependencies[op->num_dependencies++] = (struct dependency){on, on->issued};
}

/* The default stream waits for all streams of its context that are not made otherwise, and they wait for it. */
void issue(struct stream *stream, struct op *op)
{
    struct stream *first = default_of(stream->device, stream->context);
    if (stream == first) {
        for (int i = 0; i < num_streams; i++)
            if (streams[i] != stream && streams[i]->device == stream->device &&
                streams[i]->context == stream->context && !(streams[i]->flags & NON_BLOCKING))
                depend(op, streams[i]);
    } else if (!(stream->flags & NON_BLOCKING)) {
        depend(op, first);
    }
    op->number = ++stream->issued;
    if (stream->tail)
        stream->tail->next = op;
    else
        stream->head = op;
    stream->tail = op;
    if (!stream->started) {
        pthread_t thread;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for threads of the program */
        stream->started = !pthread_create(&thread, NULL, work, stream);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&changed);
}

void finish(struct stream *stream)
{
    uint64_t number = stream->issued;
    while (!ending && stream->done < number)
        pthread_cond_wait(&changed, &world);
}

void finish_device(int device)
{
    finish(&devices[device].legacy);
    for (int i = 0; i < num_streams; i++)
        if (streams[i]->device == device)
            finish(streams[i]);
}

void finish_context(struct context *context)
{
    for (int i = 0; i < num_streams; i++)
        if (streams[i]->context == context)
            finish(streams[i]);
}

void finish_all(void)
{
    for (int i = 0; i < num_devices; i++)
        finish_device(i);
}

/* Of a green context that is current, its own work is waited for; of a device, also that of its green contexts. */
API cudaError_t cudaDeviceSynchronize(void)
{
    void *python = free_python();
    cudaError_t error = enter();
    if (!error) {
        if (!green_here)
            finish_device(here);
        else if (!(error = state_of_context(green_here)))
            finish_context(green_here);
        error = leave(error ? error : devices[here].broken);
    }
    take_python(python);
    return error;
}

API cudaError_t cudaStreamSynchronize(struct stream *handle)
{
    void *python = free_python();
    cudaError_t error = enter();
    if (!error) {
        struct stream *stream = stream_of(handle);
        if (stream)
            finish(stream);
        error = leave(stream ? devices[stream->device].broken : why_unusable(handle));
    }
    take_python(python);
    return error;
}

API cudaError_t cudaStreamQuery(struct stream *handle)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct stream *stream = stream_of(handle);
    if (!stream)
        return leave(why_unusable(handle));
    error = devices[stream->device].broken;
    return leave(error ? error : stream->done < stream->issued ? NOT_READY : SUCCESS);
}

/* Return NULL if there are too many. */
struct stream *make_stream(int device, struct context *context, unsigned flags, int priority)
{
    if (num_streams == MAX_STREAMS)
        return NULL;
    struct stream *stream = calloc(1, sizeof *stream);
    *stream = (struct stream){
        .device = device, .context = context, .flags = flags, .index = num_streams, .alive = true};
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    stream->random = (uint64_t)(setting("CUDA_DOUBLE_SEED", 1) * 1000003 + num_streams + 17) * 0x9E3779B97F4A7C15u | 1;
    return streams[num_streams++] = stream; /* not freed, so that a handle of a destroyed one is known as such */
}

API cudaError_t cudaStreamCreateWithPriority(struct stream **made, unsigned flags, int priority)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if ((error = state_of(here)) || (error = state_of_context(green_here)))
        return leave(error);
    struct stream *stream = make_stream(here, green_here, flags, priority);
    if (stream)
        *made = stream;
    return leave(stream ? SUCCESS : OUT_OF_MEMORY);
}

API cudaError_t cudaStreamCreateWithFlags(struct stream **made, unsigned flags)
{
    return cudaStreamCreateWithPriority(made, flags, 0);
}

API cudaError_t cudaStreamCreate(struct stream **made) { return cudaStreamCreateWithPriority(made, 0, 0); }

API cudaError_t cudaStreamDestroy(struct stream *handle)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct stream *stream = known(handle); /* that of a context that is gone, too */
    if (!stream || is_default(handle))
        return leave(INVALID_HANDLE);
    stream->alive = false; /* its thread ends when its work has ended */
    pthread_cond_broadcast(&changed);
    return leave(SUCCESS);
}

API cudaError_t cudaStreamGetPriority(struct stream *handle, int *priority)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct stream *stream = stream_of(handle);
    if (!stream)
        return leave(why_unusable(handle));
    *priority = stream->priority;
    return leave(SUCCESS);
}

API cudaError_t cudaStreamIsCapturing(struct stream *handle, int *status)
{
    (void)handle;
    *status = 0;
    return SUCCESS;
}

API cudaError_t cudaStreamGetCaptureInfo(struct stream *handle, int *status)
{
    (void)handle;
    *status = 0;
    return SUCCESS;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, SUCCESS; }

/* ---- events ---- */

static struct event *event_of(struct event *handle)
{
    for (struct event *event = events; event; event = event->next)
        if (event == handle)
            return event->alive ? event : NULL;
    return NULL;
}

static struct event *add_event(struct event made)
{
    struct event *event = malloc(sizeof made);
    *event = made;
    event->alive = true;
    event->next = events;
    return events = event;
}

API cudaError_t cudaEventCreateWithFlags(struct event **made, unsigned flags)
{
    cudaError_t error = enter();
    if (error)
        return error;
    if ((error = state_of(here)))
        return leave(error);
    struct event event = {.device = here, .flags = flags, .fd = -1};
    if (flags & BETWEEN_PROCESSES) {
        if (!(flags & NO_TIMING))
            return leave(INVALID_VALUE);
        event.fd = memfd_create("cuda-double-event", MFD_CLOEXEC);
        void *page = event.fd < 0 || ftruncate(event.fd, 4096)
                         ? MAP_FAILED
                         : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, event.fd, 0);
        if (page == MAP_FAILED)
            return leave(OUT_OF_MEMORY);
        event.shared = page;
        event.shared->owner = getpid();
    }
    *made = add_event(event);
    return leave(SUCCESS);
}

API cudaError_t cudaEventCreate(struct event **made) { return cudaEventCreateWithFlags(made, 0); }

API cudaError_t cudaEventDestroy(struct event *handle)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct event *event = event_of(handle);
    if (!event)
        return leave(INVALID_HANDLE);
    if (event->fd >= 0)
        close(event->fd); /* its page stays mapped: who waits for it still may */
    let_go(event->latest);
    struct event **place = &events;
    while (*place != event)
        place = &(*place)->next;
    *place = event->next;
    free(event);
    return leave(SUCCESS);
}

API cudaError_t cudaEventRecordWithFlags(struct event *handle, struct stream *on, unsigned flags)
{
    cudaError_t error = enter();
    (void)flags;
    if (error)
        return error;
    struct event *event = event_of(handle);
    struct stream *stream = stream_of(on);
    if (!stream)
        return leave(why_unusable(on));
    if (!event || event->device != stream->device || event->imported)
        return leave(INVALID_HANDLE);
    if ((error = state_of(stream->device)))
        return leave(error);
    struct op *op = new_op(RECORD);
    op->mark = new_mark(event);
    counts.records++;
    issue(stream, op);
    return leave(SUCCESS);
}

API cudaError_t cudaEventRecord(struct event *handle, struct stream *on) { return cudaEventRecordWithFlags(handle, on, 0); }

API cudaError_t cudaStreamWaitEvent(struct stream *on, struct event *handle, unsigned flags)
{
    cudaError_t error = enter();
    (void)flags;
    if (error)
        return error;
    struct event *event = event_of(handle);
    struct stream *stream = stream_of(on);
    if (!stream)
        return leave(why_unusable(on));
    if (!event)
        return leave(INVALID_HANDLE);
    if ((error = state_of(stream->device)))
        return leave(error);
    counts.waits++;
    struct op *op = new_op(WAIT);
    op->mark = latest(event);
    issue(stream, op);
    return leave(SUCCESS);
}

API cudaError_t cudaEventQuery(struct event *handle)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct event *event = event_of(handle);
    if (!event)
        return leave(INVALID_HANDLE);
    struct mark *mark = latest(event);
    bool reached = is_reached(mark);
    let_go(mark);
    error = devices[event->device].broken;
    return leave(error ? error : reached ? SUCCESS : NOT_READY);
}

API cudaError_t cudaEventSynchronize(struct event *handle)
{
    void *python = free_python();
    cudaError_t error = enter();
    if (!error) {
        struct event *event = event_of(handle);
        int device = event ? event->device : 0;
        struct mark *mark = event ? latest(event) : NULL;
        while (!ending && !is_reached(mark)) {
            if (mark->shared)
                wait_a_little(POLL_MICROSECONDS);
            else
                pthread_cond_wait(&changed, &world);
        }
        let_go(mark);
        error = leave(event ? devices[device].broken : INVALID_HANDLE);
    }
    take_python(python);
    return error;
}

API cudaError_t cudaEventElapsedTime(float *ms, struct event *from, struct event *to)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct event *start = event_of(from), *end = event_of(to);
    if (!start || !end || !start->latest || !end->latest || (start->flags | end->flags) & NO_TIMING)
        return leave(INVALID_HANDLE);
    if (!start->latest->reached || !end->latest->reached)
        return leave(NOT_READY);
    *ms = (float)(end->latest->at - start->latest->at);
    return leave(SUCCESS);
}

API cudaError_t cudaIpcGetEventHandle(struct cudaIpcEventHandle *handle, struct event *of)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct event *event = event_of(of);
    if (!event || !event->shared || event->imported)
        return leave(INVALID_HANDLE);
    struct stat file;
    fstat(event->fd, &file);
    memset(handle, 0, sizeof *handle);
    snprintf(handle->reserved, sizeof handle->reserved, "%d %d %lu", getpid(), event->fd, (unsigned long)file.st_ino);
    return leave(SUCCESS);
}

API cudaError_t cudaIpcOpenEventHandle(struct event **made, struct cudaIpcEventHandle handle)
{
    cudaError_t error = enter();
    int pid, there;
    unsigned long inode;
    char path[64];
    struct stat file;
    if (error)
        return error;
    handle.reserved[sizeof handle.reserved - 1] = 0;
    if (sscanf(handle.reserved, "%d %d %lu", &pid, &there, &inode) != 3)
        return leave(INVALID_VALUE);
    if (pid == getpid())
        return leave(INVALID_CONTEXT);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, there);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *page = MAP_FAILED;
    if (fd >= 0 && !fstat(fd, &file) && file.st_ino == inode)
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (page == MAP_FAILED)
        return leave(INVALID_HANDLE);
    *made = add_event((struct event){.device = here, .flags = NO_TIMING | BETWEEN_PROCESSES, .fd = -1, .shared = page,
                                     .imported = true});
    return leave(SUCCESS);
}

/* ---- operations ---- */

/* Memory that is not pinned is read when the copy is issued, and has been written when the call returns. */
static cudaError_t copy(void *to, const void *from, size_t size, struct stream *handle, bool wait)
{
    void *python = NULL;
    cudaError_t error = enter();
    if (error)
        return error;
    struct stream *stream = stream_of(handle);
    if (!stream)
        return leave(why_unusable(handle));
    if ((error = state_of(stream->device)))
        return leave(error);
    struct op *op = new_op(COPY);
    struct block *target = block_at(to), *source = block_at(from);
    op->to = (struct range){to, size};
    op->from = (struct range){(char *)from, size};
    op->to_pinned = target && !target->trailer;
    op->from_pinned = source && !source->trailer;
    if (!source && !on_device(from)) {
        op->staged = malloc(size ? size : 1);
        memcpy(op->staged, from, size);
        counts.staged++;
    }
    wait |= !target && !on_device(to);
    counts.copies++;
    issue(stream, op);
    if (wait) {
        pthread_mutex_unlock(&world);
        python = free_python();
        pthread_mutex_lock(&world);
        finish(stream);
    }
    error = wait ? devices[stream->device].broken : SUCCESS;
    leave(error);
    take_python(python);
    return error;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, struct stream *stream)
{
    (void)kind;
    return copy(to, from, size, stream, false);
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, int kind)
{
    (void)kind;
    return copy(to, from, size, NULL, true);
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                    struct stream *stream)
{
    (void)to_device, (void)from_device;
    return copy(to, from, size, stream, false);
}

static cudaError_t fill(void *to, int value, size_t size, struct stream *handle)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct stream *stream = stream_of(handle);
    if (!stream)
        return leave(why_unusable(handle));
    if ((error = state_of(stream->device)))
        return leave(error);
    struct op *op = new_op(FILL);
    op->to = (struct range){to, size};
    op->value = value;
    counts.fills++;
    issue(stream, op);
    return leave(SUCCESS);
}

API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, struct stream *stream)
{
    return fill(to, value, size, stream);
}

API cudaError_t cudaMemset(void *to, int value, size_t size) { return fill(to, value, size, NULL); }

API cudaError_t cudaLaunchHostFunc(struct stream *handle, void (*call)(void *), void *argument)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct stream *stream = stream_of(handle);
    if (!stream)
        return leave(why_unusable(handle));
    struct op *op = new_op(CALL);
    op->call = call;
    op->argument = argument;
    issue(stream, op);
    return leave(SUCCESS);
}

/* A kernel that tests bring along: a function over the memory of some ranges. */
API int cuda_double_launch(struct stream *handle, kernel_t kernel, long ticket, int num_ranges, void **addresses,
                           const size_t *sizes)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct stream *stream = stream_of(handle);
    if (!stream || num_ranges > MAX_RANGES)
        return leave(stream ? INVALID_VALUE : why_unusable(handle));
    if ((error = state_of(stream->device)))
        return leave(error);
    struct op *op = new_op(KERNEL);
    op->kernel = kernel;
    op->ticket = ticket;
    op->num_ranges = num_ranges;
    for (int i = 0; i < num_ranges; i++)
        op->ranges[i] = (struct range){addresses[i], sizes[i]};
    counts.kernels++;
    issue(stream, op);
    return leave(SUCCESS);
}

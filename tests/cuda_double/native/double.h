/* What the files of the CUDA double share. Everything here is guarded by `world`, unless a comment says otherwise.
 *
 * Device memory has addresses that the processor cannot read: a range that is reserved and never mapped. What lies in
 * it is mapped elsewhere, and only the operations of streams see it (`memory_at`). Addresses are not used twice.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_DEVICES 8
#define MAX_STREAMS 512
#define MAX_RANGES 16
#define API __attribute__((visibility("default")))

enum { /* errors, by the numbers of CUDA */
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INITIALIZATION = 3,
    INVALID_FUNCTION = 98,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED = 205,
    PEER_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ALREADY_ENABLED = 704,
    CONTEXT_DESTROYED = 709,
    ALREADY_PINNED = 712,
    NOT_PINNED = 713,
    DEVICE_ASSERT = 710,
    NOT_SUPPORTED = 801,
    INVALID_RESOURCE_TYPE = 914,
    INVALID_RESOURCE_CONFIGURATION = 915,
    STREAM_DETACHED = 917,
};
enum { NON_BLOCKING = 1 }; /* a flag of streams */
typedef int cudaError_t;

enum memory_kind { DEVICE, IMPORTED, PINNED, REGISTERED };

/* Behind the content of a block of a device, in the file that is shared with other processes. */
struct trailer {
    _Atomic int freed;
};

struct block {
    enum memory_kind kind;
    int device;
    char *address;      /* as callers know it */
    char *content;      /* where the processor finds it */
    size_t size, file_size;
    struct trailer *trailer; /* NULL for memory of the host */
    int fd, opened;     /* of device memory; how often an imported block was opened */
    char name[64];      /* of imported memory: the handle it came from */
    int users;          /* operations that read or write it now */
    struct block *next;
};

/* One recording of an event. Of events between processes, the state is in memory that both map. */
struct shared_event {
    _Atomic uint64_t recorded, reached;
    pid_t owner;
};
struct mark {
    int refs;
    bool reached;
    double at; /* milliseconds */
    struct shared_event *shared;
    uint64_t generation;
};
struct event {
    int device;
    unsigned flags;
    struct mark *latest;
    struct shared_event *shared;
    int fd;
    bool imported, alive;
    struct event *next;
};

struct stream;
struct dependency {
    struct stream *stream;
    uint64_t number;
};
enum verb { COPY, FILL, RECORD, WAIT, CALL, KERNEL };
struct range {
    char *address;
    size_t size;
};
typedef int (*kernel_t)(long ticket, void **content); /* content is NULL if the kernel must not run */
struct op {
    enum verb verb;
    uint64_t number;
    struct range to, from;
    bool to_pinned, from_pinned;
    char *staged; /* content of pageable memory, as it was when the copy was issued */
    int value;
    struct mark *mark;
    void (*call)(void *);
    void *argument;
    kernel_t kernel;
    long ticket;
    int num_ranges;
    struct range ranges[MAX_RANGES];
    int num_dependencies;
    struct dependency *dependencies;
    struct op *next;
};
/* A green context: streams of its own, and the number of multiprocessors that they are said to have. */
struct context {
    int device;
    unsigned num_sms;
    bool alive;
    struct stream *own; /* its default stream */
    struct context *next;
};
struct stream {
    int device, priority, index;
    unsigned flags;
    struct context *context; /* NULL: the primary one of the device */
    bool alive, started, held;
    uint64_t issued, done;
    uint64_t random;
    struct op *head, *tail;
};
struct device {
    int number; /* of the host, whatever is visible */
    cudaError_t broken;
    size_t used;
    bool engine_busy, peers[MAX_DEVICES];
    struct stream legacy;
};
struct counts {
    long copies, fills, kernels, refused, waits, records, opened, closed, staged;
};

extern pthread_mutex_t world;
extern pthread_cond_t changed; /* an operation has ended, or a stream may go on */
extern struct device devices[MAX_DEVICES];
extern int num_devices;
extern struct stream *streams[MAX_STREAMS]; /* without those of `struct device` */
extern int num_streams;
extern struct counts counts;
extern size_t memory_bound;
extern bool held, ending;
extern __thread int here; /* device that is current in this thread */
extern __thread struct context *green_here; /* green context that is; NULL: the primary one of the device */

/* devices.c */
cudaError_t said(cudaError_t error);       /* note it as the last error of this thread */
cudaError_t enter(void);                   /* lock the world; on an error it is not locked */
cudaError_t leave(cudaError_t error);      /* unlock it */
cudaError_t state_of(int device);
long setting(const char *name, long usual);
void *free_python(void);                   /* let other threads run Python while this one waits */
void take_python(void *state);

/* memory.c */
struct block *block_at(const void *address);
bool on_device(const void *address);
char *memory_at(struct range range, int device, bool is_kernel, struct block **used);

/* contexts.c */
cudaError_t state_of_context(struct context *context);

/* streams.c */
struct stream *stream_of(struct stream *handle); /* NULL if it cannot be used: */
cudaError_t why_unusable(struct stream *handle);
struct stream *make_stream(int device, struct context *context, unsigned flags, int priority);
struct op *new_op(enum verb verb);
void issue(struct stream *stream, struct op *op);
void finish(struct stream *stream); /* wait for all that was issued; the world is locked */
void finish_device(int device);
void finish_context(struct context *context);
void finish_all(void);
void let_go(struct mark *mark);
bool is_reached(struct mark *mark);
double now_ms(void);

/* Memory of devices, pinned memory of the host, and handles with which other processes map device memory. */
#include "double.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "abi.h"

#define RESERVED (1UL << 40)
#define ALIGNMENT (2UL << 20)
#define PAGE 4096UL
#define UNWRITTEN 0xCB /* what new memory is full of */

static struct block *blocks;
static char *region, *next_address;

bool on_device(const void *address)
{
    return region && (char *)address >= region && (char *)address < region + RESERVED;
}

struct block *block_at(const void *address)
{
    for (struct block *block = blocks; block; block = block->next)
        if ((char *)address >= block->address && (char *)address < block->address + block->size)
            return block;
    return NULL;
}

/* Return where the processor finds a range; NULL if an operation of a device may not touch all of it.
 * Memory of the host that is not pinned is found where it is. A block in use is not freed before `users` is 0. */
char *memory_at(struct range range, int device, bool is_kernel, struct block **used)
{
    struct block *block = block_at(range.address);
    *used = NULL;
    if (!block)
        return on_device(range.address) ? NULL : range.address;
    if ((size_t)(range.address - block->address) + range.size > block->size)
        return NULL;
    if (block->kind == PINNED || block->kind == REGISTERED)
        return range.address;
    if (block->trailer->freed) /* by the process that it belongs to */
        return NULL;
    if (is_kernel && block->device != device && !devices[device].peers[block->device])
        return NULL;
    block->users++;
    *used = block;
    return block->content + (range.address - block->address);
}

static char *new_address(size_t size)
{
    if (!region) {
        void *made = mmap(NULL, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED)
            return NULL;
        region = made;
        next_address = (char *)(((uintptr_t)region + ALIGNMENT - 1) & ~(ALIGNMENT - 1));
    }
    char *address = next_address;
    next_address += (size + 2 * ALIGNMENT - 1) & ~(ALIGNMENT - 1); /* at least one page nobody may touch lies between */
    return next_address < region + RESERVED ? address : NULL;
}

static struct block *add(struct block made)
{
    struct block *block = malloc(sizeof made);
    *block = made;
    block->next = blocks;
    return blocks = block;
}

static void remove_block(struct block *block)
{
    struct block **place = &blocks;
    while (*place != block)
        place = &(*place)->next;
    *place = block->next;
    while (block->users)
        pthread_cond_wait(&changed, &world);
    free(block);
}

API cudaError_t cudaMalloc(void **address, size_t size)
{
    static int made;
    cudaError_t error = enter();
    if (error)
        return error;
    if ((error = state_of(here)))
        return leave(error);
    if (devices[here].used + size > memory_bound)
        return leave(OUT_OF_MEMORY);
    char name[64];
    snprintf(name, sizeof name, "cuda-double-%d-%d", getpid(), made++);
    size_t file_size = ((size + PAGE - 1) & ~(PAGE - 1)) + PAGE;
    int fd = memfd_create(name, MFD_CLOEXEC);
    char *content = fd < 0 || ftruncate(fd, (off_t)file_size)
                        ? MAP_FAILED
                        : mmap(NULL, file_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *at = content == MAP_FAILED ? NULL : new_address(size);
    if (!at) {
        if (fd >= 0)
            close(fd);
        return leave(OUT_OF_MEMORY);
    }
    memset(content, UNWRITTEN, size);
    struct trailer *trailer = (struct trailer *)(content + file_size - PAGE);
    devices[here].used += size;
    add((struct block){.kind = DEVICE, .device = here, .address = at, .content = content, .size = size,
                       .file_size = file_size, .trailer = trailer, .fd = fd});
    *address = at;
    return leave(SUCCESS);
}

API cudaError_t cudaFree(void *address)
{
    cudaError_t error;
    if (!address)
        return SUCCESS;
    if ((error = enter()))
        return error;
    struct block *block = block_at(address);
    if (!block || block->address != address || block->kind != DEVICE)
        return leave(INVALID_VALUE);
    pthread_mutex_unlock(&world);
    void *python = free_python();
    pthread_mutex_lock(&world);
    finish_device(block->device);
    block->trailer->freed = true;
    devices[block->device].used -= block->size;
    char *content = block->content;
    size_t file_size = block->file_size;
    int fd = block->fd, device = block->device;
    remove_block(block);
    munmap(content, file_size);
    close(fd);
    pthread_mutex_unlock(&world);
    take_python(python);
    return said(devices[device].broken);
}

API cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags)
{
    cudaError_t error = enter();
    (void)flags;
    if (error)
        return error;
    if ((error = state_of(here)))
        return leave(error);
    void *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED)
        return leave(OUT_OF_MEMORY);
    memset(made, UNWRITTEN, size);
    add((struct block){.kind = PINNED, .device = here, .address = made, .content = made, .size = size, .fd = -1});
    *address = made;
    return leave(SUCCESS);
}

static cudaError_t unpin(void *address, enum memory_kind kind, cudaError_t otherwise)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct block *block = block_at(address);
    if (!block || block->kind != kind || block->address != address)
        return leave(otherwise);
    pthread_mutex_unlock(&world);
    void *python = free_python();
    pthread_mutex_lock(&world);
    finish_all();
    size_t size = block->size;
    remove_block(block);
    if (kind == PINNED)
        munmap(address, size);
    pthread_mutex_unlock(&world);
    take_python(python);
    return SUCCESS;
}

API cudaError_t cudaFreeHost(void *address) { return address ? unpin(address, PINNED, INVALID_VALUE) : SUCCESS; }
API cudaError_t cudaHostUnregister(void *address) { return unpin(address, REGISTERED, NOT_PINNED); }

API cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags)
{
    cudaError_t error = enter();
    (void)flags;
    if (error)
        return error;
    if (block_at(address))
        return leave(ALREADY_PINNED);
    add((struct block){.kind = REGISTERED, .device = here, .address = address, .content = address, .size = size,
                       .fd = -1});
    return leave(SUCCESS);
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address)
{
    enum { UNREGISTERED, HOST, ON_DEVICE };
    cudaError_t error = enter();
    if (error)
        return error;
    struct block *block = block_at(address);
    memset(found, 0, sizeof *found);
    found->type = !block ? UNREGISTERED : block->trailer ? ON_DEVICE : HOST;
    found->device = block ? block->device : -1;
    found->devicePointer = block ? (void *)address : NULL;
    found->hostPointer = block && block->trailer ? NULL : (void *)address;
    return leave(SUCCESS);
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    cudaError_t error = enter();
    if (error)
        return error;
    *total = memory_bound;
    *free_bytes = memory_bound > devices[here].used ? memory_bound - devices[here].used : 0;
    return leave(state_of(here));
}

API cudaError_t cudaIpcGetMemHandle(struct cudaIpcMemHandle *handle, void *address)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct block *block = block_at(address);
    memset(handle, 0, sizeof *handle);
    if (!block || block->kind != DEVICE)
        return leave(INVALID_VALUE);
    struct stat file;
    fstat(block->fd, &file);
    snprintf(handle->reserved, sizeof handle->reserved, "%d %d %lu %zu %d", getpid(), block->fd,
             (unsigned long)file.st_ino, block->size, devices[block->device].number);
    return leave(SUCCESS);
}

API cudaError_t cudaIpcOpenMemHandle(void **address, struct cudaIpcMemHandle handle, unsigned flags)
{
    cudaError_t error = enter();
    int pid, number, there;
    unsigned long inode;
    size_t size;
    char path[64];
    struct stat file;
    (void)flags;
    if (error)
        return error;
    if ((error = state_of(here)))
        return leave(error);
    handle.reserved[sizeof handle.reserved - 1] = 0;
    if (sscanf(handle.reserved, "%d %d %lu %zu %d", &pid, &there, &inode, &size, &number) != 5)
        return leave(INVALID_VALUE);
    if (pid == getpid())
        return leave(INVALID_CONTEXT);
    if (number != devices[here].number)
        return leave(INVALID_DEVICE);
    for (struct block *block = blocks; block; block = block->next)
        if (block->kind == IMPORTED && !strcmp(block->name, handle.reserved)) {
            block->opened++;
            *address = block->address;
            return leave(SUCCESS);
        }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, there);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    size_t file_size = ((size + PAGE - 1) & ~(PAGE - 1)) + PAGE;
    char *content = MAP_FAILED;
    if (fd >= 0 && !fstat(fd, &file) && file.st_ino == inode && (size_t)file.st_size == file_size)
        content = mmap(NULL, file_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    char *at = content == MAP_FAILED ? NULL : new_address(size);
    if (!at)
        return leave(INVALID_HANDLE);
    struct block made = {.kind = IMPORTED, .device = here, .address = at, .content = content, .size = size,
                         .file_size = file_size, .trailer = (struct trailer *)(content + file_size - PAGE), .fd = -1,
                         .opened = 1};
    memcpy(made.name, handle.reserved, sizeof made.name);
    add(made);
    counts.opened++;
    *address = at;
    return leave(SUCCESS);
}

API cudaError_t cudaIpcCloseMemHandle(void *address)
{
    cudaError_t error = enter();
    if (error)
        return error;
    struct block *block = block_at(address);
    if (!block || block->kind != IMPORTED || block->address != address)
        return leave(INVALID_VALUE);
    if (--block->opened)
        return leave(SUCCESS);
    char *content = block->content;
    size_t file_size = block->file_size;
    counts.closed++;
    remove_block(block); /* what is still to run and touches it fails with an illegal address */
    munmap(content, file_size);
    return leave(SUCCESS);
}

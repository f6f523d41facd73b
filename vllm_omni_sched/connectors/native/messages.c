/* Steps of small messages that take many Python calls, in one call each. Optional: Python does the same without it.

   Nothing here decides: each function does what the Python code beside its caller does, byte for byte. Where something is
   unusual (a damaged message, a tensor on a device) it returns None and changes nothing, and the caller goes on in
   Python, which raises the errors.

   Memory that other processes write to is never trusted: a value is read once into a local variable, checked against the
   length of the buffer, and only then used. No function releases the interpreter lock, except that zlib.crc32 does for
   long data; callers hold the lock of their transport in any case. */

#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* F_OFD_SETLK, memmem */
#endif
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>

#if !defined(__linux__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || UINTPTR_MAX != UINT64_MAX
#error "messages are laid out for Linux on 64-bit little-endian processors"
#endif

#define INTERFACE 1 /* as in __init__.py: a module that was built from other sources is not used */

/* connectors/framing/layout.py */
#define MAGIC 0x31534F56u
#define VERSION 3
#define CHECKED 8
#define HERE 0xFFFFFFFFu

typedef struct __attribute__((packed)) {
    uint32_t checksum, magic;
    uint16_t version, flags;
    uint32_t in_name, in_body, places;
    uint64_t generation, total, id;
    uint32_t of_buffers;
} Head;

typedef struct __attribute__((packed)) {
    uint64_t at, nbytes;
} Place;

typedef struct __attribute__((packed)) {
    uint32_t buffer;
    uint16_t described;
} Value;

/* connectors/arena/layout.py */
#define PAGE 4096
#define BUCKET 16
#define NEWS_AT 1024
#define NEWS_KINDS 256
#define RING 0
enum { FREE, READY, LEASED, CONSUMED };

typedef struct __attribute__((packed)) {
    uint32_t state, generation, pool, revoked;
    uint64_t offset, nbytes, holder;
    double put_at;
    uint8_t unused[16];
} Record;

_Static_assert(sizeof(Head) == 52 && sizeof(Place) == 16 && sizeof(Value) == 6 && sizeof(Record) == 64, "layout");

static PyObject *crc32, *from_dlpack, *s_nbytes, *s_is_cpu, *s_is_neg, *s_is_conj, *s_is_contiguous, *s_data_ptr;

/* Set `sum` to the CRC-32 of bytes; return -1 with an exception on failure. */
static int checksum_of(const uint8_t *data, size_t nbytes, uint32_t *sum) {
    PyObject *view = PyMemoryView_FromMemory((char *)data, (Py_ssize_t)nbytes, PyBUF_READ);
    PyObject *found = view == NULL ? NULL : PyObject_CallOneArg(crc32, view);
    Py_XDECREF(view);
    if (found == NULL) return -1;
    *sum = (uint32_t)PyLong_AsUnsignedLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

/* Fronts of messages: connectors/framing */

PyDoc_STRVAR(write_front_doc,
             "write_front(target, name, body, places, flags, generation, nbytes, id, of_buffers)\n--\n\n"
             "Write header, table, name and body; see `Message._front`.");

static PyObject *write_front(PyObject *module, PyObject *args) {
    Py_buffer target, name, body;
    PyObject *places, *result = NULL;
    unsigned long long generation, nbytes, id;
    unsigned int flags, of_buffers;
    if (!PyArg_ParseTuple(args, "w*y*y*O!IKKKI", &target, &name, &body, &PyList_Type, &places, &flags, &generation,
                          &nbytes, &id, &of_buffers))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(places);
    /* lengths are below 2^63, so a sum of two does not overflow; the table is checked first */
    size_t room = (size_t)target.len, table = sizeof(Place) * (size_t)count;
    if (room < sizeof(Head) || table > room - sizeof(Head) || (size_t)name.len > UINT32_MAX ||
        (size_t)body.len > UINT32_MAX || (size_t)name.len + (size_t)body.len > room - sizeof(Head) - table) {
        PyErr_SetString(PyExc_ValueError, "the front of a message does not fit");
        goto done;
    }
    uint8_t *to = target.buf;
    uint8_t *end = to + sizeof(Head);
    for (Py_ssize_t i = 0; i < count; i++, end += sizeof(Place)) {
        PyObject *pair = PyList_GET_ITEM(places, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
            PyErr_SetString(PyExc_TypeError, "a place is a tuple of offset and bytes");
            goto done;
        }
        Place place = {PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(pair, 0)),
                       PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(pair, 1))};
        if (PyErr_Occurred()) goto done;
        memcpy(end, &place, sizeof place);
    }
    memcpy(end, name.buf, (size_t)name.len);
    memcpy(end + name.len, body.buf, (size_t)body.len);
    end += name.len + body.len;
    Head head = {0,        MAGIC,      VERSION, (uint16_t)flags, (uint32_t)name.len, (uint32_t)body.len, (uint32_t)count,
                 generation, nbytes, id,      of_buffers};
    memcpy(to, &head, sizeof head);
    uint32_t sum;
    if (checksum_of(to + sizeof sum, (size_t)(end - to) - sizeof sum, &sum) < 0) goto done;
    memcpy(to, &sum, sizeof sum);
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&target);
    PyBuffer_Release(&name);
    PyBuffer_Release(&body);
    return result;
}

/* Return the front of a message as a tuple for `Arrival`: flags, generation, bytes in all, id, checksum of the buffers,
   start and end of the body, places of the buffers. None if anything is wrong; NULL with an exception on failure. */
static PyObject *front_of(const uint8_t *data, size_t length, const char *name, size_t in_name, const uint64_t *made) {
    Head head;
    if (length < sizeof head) Py_RETURN_NONE;
    memcpy(&head, data, sizeof head);
    uint64_t start = sizeof head + sizeof(Place) * (uint64_t)head.places;
    uint64_t end = start + head.in_name + head.in_body; /* of numbers below 2^36 */
    if (head.magic != MAGIC || head.version != VERSION || end > head.total || head.total > length) Py_RETURN_NONE;
    uint32_t sum;
    if (checksum_of(data + sizeof sum, end - sizeof sum, &sum) < 0) return NULL;
    if (sum != head.checksum || (made != NULL && *made != head.generation)) Py_RETURN_NONE;
    if (name != NULL && (in_name != head.in_name || memcmp(data + start, name, in_name) != 0)) Py_RETURN_NONE;
    PyObject *places = PyList_New(0);
    if (places == NULL) return NULL;
    for (uint64_t i = 0; i < head.places; i++) {
        Place place;
        memcpy(&place, data + sizeof head + i * sizeof place, sizeof place);
        if (place.nbytes > head.total || place.at > head.total - place.nbytes || place.at < end) {
            Py_DECREF(places);
            Py_RETURN_NONE;
        }
        PyObject *pair = Py_BuildValue("(KK)", (unsigned long long)place.at, (unsigned long long)place.nbytes);
        if (pair == NULL || PyList_Append(places, pair) < 0) {
            Py_XDECREF(pair);
            Py_DECREF(places);
            return NULL;
        }
        Py_DECREF(pair);
    }
    return Py_BuildValue("(HKKKIKKN)", head.flags, (unsigned long long)head.generation, (unsigned long long)head.total,
                         (unsigned long long)head.id, head.of_buffers, (unsigned long long)(start + head.in_name),
                         (unsigned long long)end, places);
}

PyDoc_STRVAR(read_front_doc, "read_front(data, name, generation)\n--\n\n"
                             "Return the checked front of a message, None if it is damaged or another one.");

static PyObject *read_front(PyObject *module, PyObject *args) {
    Py_buffer data;
    const char *name;
    Py_ssize_t in_name;
    PyObject *generation;
    if (!PyArg_ParseTuple(args, "y*z#O", &data, &name, &in_name, &generation)) return NULL;
    uint64_t made = generation == Py_None ? 0 : PyLong_AsUnsignedLongLong(generation);
    PyObject *front = NULL;
    if (!PyErr_Occurred())
        front = front_of(data.buf, (size_t)data.len, name, (size_t)in_name, generation == Py_None ? NULL : &made);
    PyBuffer_Release(&data);
    return front;
}

PyDoc_STRVAR(may_hold_outputs_doc, "may_hold_outputs(body)\n--\n\nSee `omni.payloads._may_hold_outputs`.");

static PyObject *may_hold_outputs(PyObject *module, PyObject *body) {
    if (!PyBytes_Check(body)) return PyErr_Format(PyExc_TypeError, "bytes expected");
    const char *data = PyBytes_AS_STRING(body);
    size_t nbytes = (size_t)PyBytes_GET_SIZE(body);
#define HAS(word) (memmem(data, nbytes, word, sizeof word - 1) != NULL)
    int found = HAS("finish") && ((HAS("finished") && (HAS("final_output_type") || HAS("images"))) ||
                                  (HAS("token_ids") && HAS("finish_reason")));
#undef HAS
    return PyBool_FromLong(found);
}

/* Tensors in bodies: `Packer._tensor` and `Opener._from_extension` of connectors/framing */

static int is_true(PyObject *object, PyObject *name, int call) {
    PyObject *found = call ? PyObject_CallMethodNoArgs(object, name) : PyObject_GetAttr(object, name);
    if (found == NULL) return -1;
    int yes = found == Py_True;
    Py_DECREF(found);
    return yes;
}

PyDoc_STRVAR(embedded_doc, "embedded(tensor, front, nbytes)\n--\n\n"
                           "Return front and data of a plain tensor on the host as one object; None for others.");

static PyObject *embedded(PyObject *module, PyObject *args) {
    PyObject *tensor, *front;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "OSn", &tensor, &front, &nbytes)) return NULL;
    int cpu = is_true(tensor, s_is_cpu, 0), neg = is_true(tensor, s_is_neg, 1), conj = is_true(tensor, s_is_conj, 1);
    int dense = is_true(tensor, s_is_contiguous, 1);
    if (cpu < 0 || neg < 0 || conj < 0 || dense < 0) return NULL;
    if (!cpu || neg || conj || !dense) Py_RETURN_NONE;
    PyObject *has = PyObject_GetAttr(tensor, s_nbytes), *at = PyObject_CallMethodNoArgs(tensor, s_data_ptr);
    Py_ssize_t there = has == NULL ? -1 : PyLong_AsSsize_t(has);
    void *data = at == NULL ? NULL : PyLong_AsVoidPtr(at);
    Py_XDECREF(has);
    Py_XDECREF(at);
    if (PyErr_Occurred()) return NULL;
    if (nbytes <= 0 || there != nbytes || data == NULL) Py_RETURN_NONE;
    Py_ssize_t before = PyBytes_GET_SIZE(front);
    PyObject *both = PyBytes_FromStringAndSize(NULL, before + nbytes);
    if (both == NULL) return NULL;
    memcpy(PyBytes_AS_STRING(both), PyBytes_AS_STRING(front), (size_t)before);
    memcpy(PyBytes_AS_STRING(both) + before, data, (size_t)nbytes);
    return both;
}

/* DLPack, the C interface through which torch takes memory of others as a tensor, without its operators: those release
   the interpreter lock, and a busy thread that gets it may keep it for 5 ms. Legacy structures, version 0. */
typedef struct Managed {
    struct {
        void *data;
        int32_t device_type, device_id;
        int32_t ndim;
        uint8_t code, bits;
        uint16_t lanes;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } tensor;
    void *context;
    void (*deleter)(struct Managed *);
} Managed;

#define ON_CPU 1
#define MOST_DIMENSIONS 64
#define ALIGNMENT 64

typedef struct {
    Managed managed;
    Py_buffer buffer; /* obj is NULL if the data follows */
    int64_t sizes[]; /* shape, strides, and the data if it is in here */
} Block;

static void delete_block(Managed *managed) { /* called by torch, in any thread, with or without the interpreter lock */
    Block *block = (Block *)managed;
    if (block->buffer.obj != NULL && Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        PyBuffer_Release(&block->buffer);
        PyGILState_Release(state);
    }
    PyMem_RawFree(block);
}

static void delete_capsule(PyObject *capsule) { /* torch renames what it has taken */
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        Managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    }
}

PyDoc_STRVAR(tensor_doc, "tensor(data, places, kinds)\n--\n\n"
                         "Return the tensor that an extension describes: a view of its buffer, or of a copy of its data.\n\n"
                         "None if its kind is not in ``kinds``, or anything is unusual.");

static PyObject *tensor(PyObject *module, PyObject *args) {
    Py_buffer data;
    PyObject *places, *kinds, *described = NULL, *result = NULL;
    Block *block = NULL;
    if (!PyArg_ParseTuple(args, "y*O!O!", &data, &PyList_Type, &places, &PyDict_Type, &kinds)) return NULL;
    const uint8_t *at = data.buf;
    Value value;
    if (from_dlpack == NULL || (size_t)data.len < sizeof value) goto unusual;
    memcpy(&value, at, sizeof value);
    size_t start = sizeof value + value.described;
    if ((size_t)data.len < start) goto unusual;
    described = PyBytes_FromStringAndSize((const char *)at + sizeof value, value.described);
    if (described == NULL) goto done;
    PyObject *kind = PyDict_GetItemWithError(kinds, described); /* code and bits of DLPack, bytes, shape */
    if (kind == NULL) {
        if (PyErr_Occurred()) goto done;
        goto unusual;
    }
    int code, bits;
    unsigned long long expected;
    PyObject *shape, *source = NULL;
    if (!PyArg_ParseTuple(kind, "iiKO!", &code, &bits, &expected, &PyTuple_Type, &shape)) goto done;
    Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    unsigned long long from = 0, nbytes = (size_t)data.len - start;
    if (value.buffer != HERE) {
        PyObject *holder;
        if ((Py_ssize_t)value.buffer >= PyList_GET_SIZE(places)) goto unusual;
        PyObject *place = PyList_GET_ITEM(places, (Py_ssize_t)value.buffer);
        if (!PyTuple_Check(place) || !PyArg_ParseTuple(place, "OKK", &holder, &from, &nbytes)) goto done;
        source = holder;
    }
    if (nbytes != expected || !nbytes || nbytes > PY_SSIZE_T_MAX / 2 || ndim > MOST_DIMENSIONS) goto unusual;
    size_t inside = source == NULL ? (size_t)nbytes + ALIGNMENT : 0;
    block = PyMem_RawCalloc(1, sizeof(Block) + 2 * sizeof(int64_t) * (size_t)ndim + inside);
    if (block == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t *sizes = block->sizes, *strides = sizes + ndim, stride = 1;
    for (Py_ssize_t i = ndim - 1; i >= 0; i--) {
        sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (sizes[i] <= 0) goto done_or_unusual; /* without data, or no number */
        strides[i] = stride;
        if (__builtin_mul_overflow(stride, sizes[i], &stride)) goto unusual;
    }
    if ((bits != 8 && bits != 16 && bits != 32 && bits != 64 && bits != 128) || stride > PY_SSIZE_T_MAX / 16 ||
        (unsigned long long)stride * (unsigned)(bits / 8) != nbytes)
        goto unusual;
    uint8_t *memory;
    if (source == NULL) {
        uintptr_t after = (uintptr_t)(strides + ndim);
        memory = (uint8_t *)((after + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        memcpy(memory, at + start, (size_t)nbytes);
    } else {
        if (PyObject_GetBuffer(source, &block->buffer, PyBUF_WRITABLE) < 0) { /* a tensor on a device, or read-only */
            PyErr_Clear();
            block->buffer.obj = NULL;
            goto unusual;
        }
        if ((unsigned long long)block->buffer.len < nbytes || from > (unsigned long long)block->buffer.len - nbytes)
            goto unusual;
        memory = (uint8_t *)block->buffer.buf + from;
    }
    block->managed.tensor.data = memory;
    block->managed.tensor.device_type = ON_CPU;
    block->managed.tensor.ndim = (int32_t)ndim;
    block->managed.tensor.code = (uint8_t)code;
    block->managed.tensor.bits = (uint8_t)bits;
    block->managed.tensor.lanes = 1;
    block->managed.tensor.shape = sizes;
    block->managed.tensor.strides = strides;
    block->managed.deleter = delete_block;
    PyObject *capsule = PyCapsule_New(&block->managed, "dltensor", delete_capsule);
    if (capsule == NULL) goto done;
    block = NULL; /* it belongs to the capsule, and then to the tensor */
    result = PyObject_CallOneArg(from_dlpack, capsule);
    Py_DECREF(capsule);
    goto done;
done_or_unusual:
    if (PyErr_Occurred()) goto done;
unusual:
    result = Py_NewRef(Py_None);
done:
    if (block != NULL) delete_block(&block->managed);
    Py_XDECREF(described);
    PyBuffer_Release(&data);
    return result;
}

PyDoc_STRVAR(use_torch_doc, "use_torch(from_dlpack)\n--\n\nSet the function that makes tensors of DLPack capsules.");

static PyObject *use_torch(PyObject *module, PyObject *function) {
    Py_XSETREF(from_dlpack, Py_NewRef(function));
    Py_RETURN_NONE;
}

/* The index of an outbox: connectors/arena/index.py */

typedef struct {
    PyObject_HEAD
    Py_buffer map; /* obj is NULL until __init__ */
    int fd;
    uint64_t slots, records, ring;
} Slots;

static int slots_init(Slots *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"map", "fd", "slots", "records", "ring", NULL};
    unsigned long long slots, records, ring;
    Py_buffer map;
    int fd;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*iKKK", names, &map, &fd, &slots, &records, &ring)) return -1;
    int fits = slots >= 2 * BUCKET && slots <= 1 << 20 && !(slots & (slots - 1)) && records == PAGE + slots * 8 &&
               ring >= records + slots * sizeof(Record) && ring <= (unsigned long long)map.len;
    if (!fits || self->map.obj != NULL || (uintptr_t)map.buf % 8) {
        PyBuffer_Release(&map);
        PyErr_SetString(PyExc_ValueError, "not the layout of an outbox");
        return -1;
    }
    self->map = map;
    self->fd = fd, self->slots = slots, self->records = records, self->ring = ring;
    return 0;
}

static void slots_dealloc(Slots *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->map.obj != NULL) PyBuffer_Release(&self->map);
    type->tp_free(self);
    Py_DECREF(type);
}

static Record *record_at(Slots *self, uint64_t slot) { /* mapped memory is aligned, and so are records */
    return (Record *)((uint8_t *)self->map.buf + self->records + slot * sizeof(Record));
}

static uint64_t *digest_at(Slots *self, uint64_t slot) { return (uint64_t *)((uint8_t *)self->map.buf + PAGE) + slot; }

static uint32_t state_of(Record *record) { return __atomic_load_n((uint32_t *)record, __ATOMIC_ACQUIRE); }

static void set_state(Record *record, uint32_t state) { __atomic_store_n((uint32_t *)record, state, __ATOMIC_RELEASE); }

static int has_slot(Slots *self, unsigned long long slot) {
    if (self->map.obj != NULL && slot < self->slots) return 1;
    PyErr_SetString(PyExc_IndexError, "no such slot");
    return 0;
}

PyDoc_STRVAR(find_doc, "find(digest)\n--\n\nSee `Index.find`.");

static PyObject *slots_find(Slots *self, PyObject *number) {
    unsigned long long digest = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() || !has_slot(self, 0)) return NULL;
    PyObject *found = PyList_New(0);
    uint64_t mask = self->slots / BUCKET - 1, buckets[2] = {digest & mask, (digest >> 32) & mask};
    for (int i = 0; found != NULL && i < 2; i++)
        for (uint64_t slot = buckets[i] * BUCKET; slot < (buckets[i] + 1) * BUCKET; slot++) {
            if (__atomic_load_n(digest_at(self, slot), __ATOMIC_RELAXED) != digest) continue;
            if (state_of(record_at(self, slot)) != READY) continue;
            PyObject *index = PyLong_FromUnsignedLongLong(slot);
            if (index == NULL || PyList_Append(found, index) < 0) Py_CLEAR(found);
            Py_XDECREF(index);
            if (found == NULL) break;
        }
    return found;
}

PyDoc_STRVAR(publish_doc, "publish(slot, digest, generation, pool, offset, nbytes, put_at)\n--\n\nSee `Index.publish`.");

static PyObject *slots_publish(Slots *self, PyObject *args) {
    unsigned long long slot, digest, offset, nbytes;
    unsigned int generation, pool;
    double put_at;
    if (!PyArg_ParseTuple(args, "KKIIKKd", &slot, &digest, &generation, &pool, &offset, &nbytes, &put_at)) return NULL;
    if (!has_slot(self, slot)) return NULL;
    Record *record = record_at(self, slot), made = {FREE, generation, pool, 0, offset, nbytes, 0, put_at, {0}};
    memcpy((uint8_t *)record + sizeof(uint32_t), (uint8_t *)&made + sizeof(uint32_t), offsetof(Record, unused) - 4);
    __atomic_store_n(digest_at(self, slot), digest, __ATOMIC_RELAXED);
    set_state(record, READY);
    uint32_t *news = (uint32_t *)((uint8_t *)self->map.buf + NEWS_AT) + digest % NEWS_KINDS;
    __atomic_add_fetch(news, 1, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static int lock_byte(Slots *self, uint64_t slot, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)(self->records + slot * sizeof(Record)),
                         .l_len = 1};
    return fcntl(self->fd, F_OFD_SETLK, &lock);
}

PyDoc_STRVAR(take_doc,
             "take(slot, digest, name)\n--\n\n"
             "Take a message out of the ring, as `Index.take`: return a copy, its checked front and when it was put.\n\n"
             "None if it is not available, or locked; False, with nothing changed, if it is damaged.");

static PyObject *slots_take(Slots *self, PyObject *args) {
    unsigned long long slot, digest;
    Py_buffer name;
    if (!PyArg_ParseTuple(args, "KKy*", &slot, &digest, &name)) return NULL;
    PyObject *result = NULL, *data = NULL, *front = NULL;
    if (!has_slot(self, slot)) goto done;
    if (lock_byte(self, slot, F_WRLCK) < 0) {
        if (errno == EAGAIN || errno == EACCES)
            result = Py_NewRef(Py_None);
        else
            PyErr_SetFromErrno(PyExc_OSError);
        goto done;
    }
    Record *shared = record_at(self, slot), record;
    uint32_t state = state_of(shared);
    memcpy(&record, shared, sizeof record);
    uint64_t digest_there = __atomic_load_n(digest_at(self, slot), __ATOMIC_RELAXED);
    if (state != READY || record.revoked || record.pool != RING || digest_there != digest) {
        result = Py_NewRef(Py_None);
        goto unlock;
    }
    uint64_t room = (uint64_t)self->map.len - self->ring;
    if (!record.nbytes || record.nbytes > room || record.offset > room - record.nbytes) {
        result = Py_NewRef(Py_False);
        goto unlock;
    }
    const char *at = (const char *)self->map.buf + self->ring + record.offset;
    data = PyByteArray_FromStringAndSize(at, (Py_ssize_t)record.nbytes);
    if (data == NULL) goto unlock;
    uint64_t made = record.generation;
    front = front_of((uint8_t *)PyByteArray_AS_STRING(data), (size_t)record.nbytes, name.buf, (size_t)name.len, &made);
    if (front == Py_None)
        result = Py_NewRef(Py_False);
    else if (front != NULL && (result = Py_BuildValue("(OOd)", data, front, record.put_at)) != NULL)
        set_state(shared, CONSUMED); /* nothing can fail any more */
unlock:
    lock_byte(self, slot, F_UNLCK);
done:
    Py_XDECREF(data);
    Py_XDECREF(front);
    PyBuffer_Release(&name);
    return result;
}

static PyMethodDef slots_methods[] = {
    {"find", (PyCFunction)slots_find, METH_O, find_doc},
    {"publish", (PyCFunction)slots_publish, METH_VARARGS, publish_doc},
    {"take", (PyCFunction)slots_take, METH_VARARGS, take_doc},
    {NULL},
};

static PyType_Slot slots_slots[] = {
    {Py_tp_doc, "Slots(map, fd, slots, records, ring)\n--\n\nThe slots of an outbox; see `Index`."},
    {Py_tp_init, slots_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, slots_dealloc},
    {Py_tp_methods, slots_methods},
    {0, NULL},
};

static PyType_Spec slots_spec = {"vllm_omni_sched.connectors.native._messages.Slots", sizeof(Slots), 0, Py_TPFLAGS_DEFAULT,
                                 slots_slots};

static PyMethodDef functions[] = {
    {"write_front", write_front, METH_VARARGS, write_front_doc},
    {"read_front", read_front, METH_VARARGS, read_front_doc},
    {"may_hold_outputs", may_hold_outputs, METH_O, may_hold_outputs_doc},
    {"embedded", embedded, METH_VARARGS, embedded_doc},
    {"tensor", tensor, METH_VARARGS, tensor_doc},
    {"use_torch", use_torch, METH_O, use_torch_doc},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_messages", "Steps of small messages, compiled. See `vllm_omni_sched.connectors.native`.", -1,
    functions};

PyMODINIT_FUNC PyInit__messages(void) {
    PyObject *module = PyModule_Create(&definition), *zlib = PyImport_ImportModule("zlib");
    if (module == NULL || zlib == NULL) goto failed;
    crc32 = PyObject_GetAttrString(zlib, "crc32");
    s_nbytes = PyUnicode_InternFromString("nbytes");
    s_is_cpu = PyUnicode_InternFromString("is_cpu");
    s_is_neg = PyUnicode_InternFromString("is_neg");
    s_is_conj = PyUnicode_InternFromString("is_conj");
    s_is_contiguous = PyUnicode_InternFromString("is_contiguous");
    s_data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject *type = PyType_FromSpec(&slots_spec);
    if (!crc32 || !s_nbytes || !s_is_cpu || !s_is_neg || !s_is_conj || !s_is_contiguous || !s_data_ptr || !type)
        goto failed;
    if (PyModule_AddObject(module, "Slots", type) < 0 || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        goto failed;
    Py_DECREF(zlib);
    return module;
failed:
    Py_XDECREF(zlib);
    Py_XDECREF(module);
    return NULL;
}

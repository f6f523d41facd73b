/* Steps of small messages that take many Python calls, in one call each. Optional: Python does the same without it.

   Nothing here decides: each function does what the Python code beside its caller does, byte for byte. Where something is
   unusual (a damaged message, a tensor on a device, an object that is no plain data) it says so and changes nothing, and
   the caller goes on in Python, which raises the errors.

   Memory that other processes write to is never trusted: a value is read once into a local variable, checked against the
   length of the buffer, and only then used. No function releases the interpreter lock, except that zlib.crc32 does for
   long data and torch's `is_neg` for a moment; callers hold the lock of their transport where they share something. */

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
#include <sys/syscall.h>
#include <unistd.h>

#if !defined(__linux__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || UINTPTR_MAX != UINT64_MAX
#error "messages are laid out for Linux on 64-bit little-endian processors"
#endif

#define INTERFACE 2 /* as in __init__.py: a module that was built from other sources is not used */

/* connectors/framing/layout.py */
#define MAGIC 0x31534F56u
#define VERSION 3
#define CHECKED 8
#define HERE 0xFFFFFFFFu
#define TENSOR 1

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

static PyObject *crc32, *s_dtype, *s_is_neg, *s_is_conj, *s_acquire, *s_release;
static PyObject *s_name, *s_body, *s_buffers, *s_places, *s_flags, *s_id, *s_nbytes; /* of messages */

/* Continue the CRC-32 in `sum` with bytes; return -1 with an exception on failure. */
static int add_to_checksum(const uint8_t *data, size_t nbytes, uint32_t *sum) {
    PyObject *view = PyMemoryView_FromMemory((char *)data, (Py_ssize_t)nbytes, PyBUF_READ);
    PyObject *before = view == NULL ? NULL : PyLong_FromUnsignedLong(*sum);
    PyObject *arguments[] = {view, before}, *found = before == NULL ? NULL : PyObject_Vectorcall(crc32, arguments, 2, NULL);
    Py_XDECREF(view);
    Py_XDECREF(before);
    if (found == NULL) return -1;
    *sum = (uint32_t)PyLong_AsUnsignedLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

static int checksum_of(const uint8_t *data, size_t nbytes, uint32_t *sum) {
    *sum = 0;
    return add_to_checksum(data, nbytes, sum);
}

/* Tensors, through DLPack: the C interface by which torch shows its tensors and takes memory of others as a tensor, without
   its operators: those release the interpreter lock, and a busy thread that gets it may keep it for 5 ms. Only the
   interface of version 1 is used, which torch has as a table of C functions; without it, Python makes and reads tensors. */

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct Managed {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct Managed *);
    uint64_t flags;
    Tensor tensor;
} Managed;

typedef struct {
    uint32_t major, minor;
    void *former;
    void *allocate, *from_object;
    int (*to_object)(Managed *, void **); /* takes the tensor over */
    int (*look)(void *, Tensor *);
    void *stream;
} Exchange;

#define ON_CPU 1
#define MOST_DIMENSIONS 64
#define ALIGNMENT 64

static PyObject *tensor_type; /* torch.Tensor, NULL until `use_torch` */
static const Exchange *torch;

/* Dtypes by their names in torch, with their codes and bits in DLPack; tensors of others take the Python path. DLPack alone
   does not tell: torch shows int4 as int8. */
static struct {
    const char *name;
    uint8_t code, bits;
    PyObject *object; /* NULL until `use_torch`, or if this torch has none */
} dtypes[] = {
    {"float32", 2, 32, 0}, {"bfloat16", 4, 16, 0}, {"int64", 0, 64, 0},  {"bool", 6, 8, 0},       {"float16", 2, 16, 0},
    {"int32", 0, 32, 0},   {"uint8", 1, 8, 0},     {"int16", 0, 16, 0},  {"int8", 0, 8, 0},       {"float64", 2, 64, 0},
    {"uint16", 1, 16, 0},  {"uint32", 1, 32, 0},   {"uint64", 1, 64, 0}, {"complex64", 5, 64, 0}, {"complex128", 5, 128, 0},
};
#define DTYPES (sizeof dtypes / sizeof *dtypes)
#define COMPLEX 5

PyDoc_STRVAR(use_torch_doc, "use_torch(torch)\n--\n\n"
                            "Make and read tensors of torch from now on; return whether its DLPack allows it.");

static PyObject *use_torch(PyObject *module, PyObject *library) {
    PyObject *type = PyObject_GetAttrString(library, "Tensor");
    PyObject *capsule = type == NULL ? NULL : PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const Exchange *found = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule); /* what it points to lives as long as torch */
    PyErr_Clear();
    if (found == NULL || found->major != 1 || found->look == NULL || found->to_object == NULL) {
        Py_XDECREF(type);
        Py_RETURN_FALSE;
    }
    for (size_t i = 0; i < DTYPES; i++) {
        Py_XSETREF(dtypes[i].object, PyObject_GetAttrString(library, dtypes[i].name));
        PyErr_Clear();
    }
    torch = found;
    Py_XSETREF(tensor_type, type);
    Py_RETURN_TRUE;
}

/* Return whether a method without arguments returns anything but False, or fails. */
static int may_be(PyObject *object, PyObject *method) {
    PyObject *found = PyObject_CallMethodNoArgs(object, method);
    if (found == NULL) PyErr_Clear();
    Py_XDECREF(found);
    return found != Py_False;
}

/* Look at a tensor: 1 if it is a plain one, contiguous and on the host, with its bytes and its place among `dtypes`; 0 if
   not, or without `use_torch`. Its data is valid as long as the tensor is. */
static int look_at(PyObject *object, Tensor *found, size_t *nbytes, size_t *dtype) {
    if (tensor_type == NULL || Py_TYPE(object) != (PyTypeObject *)tensor_type) return 0;
    if (torch->look(object, found) != 0) { /* no dense tensor, or one of an unknown kind */
        PyErr_Clear();
        return 0;
    }
    if (found->device_type != ON_CPU || found->lanes != 1 || found->ndim > MOST_DIMENSIONS) return 0;
    PyObject *object_dtype = PyObject_GetAttr(object, s_dtype);
    if (object_dtype == NULL) {
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(object_dtype); /* torch keeps it */
    for (*dtype = 0; dtypes[*dtype].object != object_dtype;)
        if (++*dtype == DTYPES) return 0;
    if (dtypes[*dtype].bits != found->bits) return 0;
    int64_t count = 1, dense = 1;
    for (int32_t i = found->ndim - 1; i >= 0; i--) {
        if (found->shape[i] != 1 && found->strides != NULL && found->strides[i] != count) dense = 0;
        if (found->shape[i] < 0 || __builtin_mul_overflow(count, found->shape[i], &count)) return 0;
    }
    if ((count != 0 && !dense) || count > PY_SSIZE_T_MAX / 16) return 0;
    *nbytes = (size_t)count * (found->bits / 8);
    found->data = (uint8_t *)found->data + found->byte_offset;
    return 1;
}

/* Bodies of messages: msgpack, the bytes of msgspec's encoder and the objects of its decoder, for plain data and tensors */

#define DEEPEST 64

typedef struct {
    PyObject *bytes, *buffers;
    Py_ssize_t embedded; /* most bytes of a tensor in the body */
    size_t used, longest_bytes;
    size_t longest; /* of `dtypes` */
    int32_t longest_ndim;
} Writer;

static uint8_t *room_for(Writer *to, size_t nbytes) { /* NULL with an exception */
    size_t room = (size_t)PyBytes_GET_SIZE(to->bytes);
    if (nbytes > room - to->used) {
        if (nbytes > PY_SSIZE_T_MAX / 4 || _PyBytes_Resize(&to->bytes, (Py_ssize_t)(2 * room + nbytes)) < 0) {
            if (!PyErr_Occurred()) PyErr_NoMemory();
            return NULL;
        }
    }
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(to->bytes) + to->used;
    to->used += nbytes;
    return at;
}

static void store(uint8_t *at, uint64_t value, int nbytes) { /* big endian */
    for (int i = nbytes - 1; i >= 0; i--, value >>= 8) at[i] = (uint8_t)value;
}

/* Write a byte and a number after it; -1 with an exception. */
static int write_head(Writer *to, uint8_t code, uint64_t value, int nbytes) {
    uint8_t *at = room_for(to, 1 + (size_t)nbytes);
    if (at == NULL) return -1;
    at[0] = code;
    store(at + 1, value, nbytes);
    return 0;
}

/* Write the head of what has a length: `small` up to `below`, else one of the codes with 1 (0: none), 2 or 4 bytes. */
static int write_length(Writer *to, size_t length, uint8_t small, size_t below, uint8_t one, uint8_t two) {
    if (length < below) return write_head(to, (uint8_t)(small | length), 0, 0);
    if (one && length <= UINT8_MAX) return write_head(to, one, length, 1);
    if (length <= UINT16_MAX) return write_head(to, two, length, 2);
    return write_head(to, two + 1, length, 4); /* nothing longer is written */
}

static int write_bytes(Writer *to, const void *data, size_t nbytes) {
    uint8_t *at = room_for(to, nbytes);
    if (at == NULL) return -1;
    memcpy(at, data, nbytes);
    return 0;
}

static int write_text(Writer *to, const char *data, size_t nbytes) {
    return write_length(to, nbytes, 0xA0, 32, 0xD9, 0xDA) < 0 ? -1 : write_bytes(to, data, nbytes);
}

static int write_positive(Writer *to, uint64_t value) {
    int size = value < 0x80 ? 0 : value <= UINT8_MAX ? 1 : value <= UINT16_MAX ? 2 : value <= UINT32_MAX ? 4 : 8;
    uint8_t code = size == 0 ? (uint8_t)value : size == 1 ? 0xCC : size == 2 ? 0xCD : size == 4 ? 0xCE : 0xCF;
    return write_head(to, code, value, size);
}

static int write_negative(Writer *to, int64_t value) {
    int size = value >= -32 ? 0 : value >= INT8_MIN ? 1 : value >= INT16_MIN ? 2 : value >= INT32_MIN ? 4 : 8;
    uint8_t code = size == 0 ? (uint8_t)value : size == 1 ? 0xD0 : size == 2 ? 0xD1 : size == 4 ? 0xD2 : 0xD3;
    return write_head(to, code, (uint64_t)value, size);
}

/* Write a tensor as `Packer._tensor` does; 0 if it is unusual. */
static int write_tensor(Writer *to, PyObject *object) {
    Tensor tensor;
    size_t nbytes, dtype;
    if (tensor_type == NULL || Py_TYPE(object) != (PyTypeObject *)tensor_type) return 0;
    if (may_be(object, s_is_neg)) return 0; /* negated when it is read; other threads may have run, so the look comes after */
    if (!look_at(object, &tensor, &nbytes, &dtype)) return 0;
    if (tensor.code == COMPLEX && (may_be(object, s_is_conj) || !look_at(object, &tensor, &nbytes, &dtype))) return 0;
    if (nbytes > to->longest_bytes) to->longest_bytes = nbytes, to->longest = dtype, to->longest_ndim = tensor.ndim;
    Writer text = {PyBytes_FromStringAndSize(NULL, 64), NULL, 0, 0, 0, 0, 0};
    if (text.bytes == NULL) return -1;
    int failed = write_head(&text, 0x92, 0, 0) < 0 || write_text(&text, dtypes[dtype].name, strlen(dtypes[dtype].name)) < 0 ||
                 write_length(&text, (size_t)tensor.ndim, 0x90, 16, 0, 0xDC) < 0;
    for (int32_t i = 0; !failed && i < tensor.ndim; i++) failed = write_positive(&text, (uint64_t)tensor.shape[i]) < 0;
    int apart = (Py_ssize_t)nbytes > to->embedded;
    size_t described = text.used, inside = apart ? 0 : nbytes, length = sizeof(Value) + described + inside;
    Value value = {HERE, (uint16_t)described};
    if (!failed && apart) {
        value.buffer = (uint32_t)PyList_GET_SIZE(to->buffers);
        failed = PyList_Append(to->buffers, object) < 0;
    }
    if (!failed) /* 16 bytes have a head of their own, and shorter ones that have one do not occur */
        failed = (length == 16 ? write_head(to, 0xD8, 0, 0) : write_length(to, length, 0, 0, 0xC7, 0xC8)) < 0;
    uint8_t *at = failed ? NULL : room_for(to, 1 + length);
    if (at != NULL) {
        at[0] = TENSOR;
        memcpy(at + 1, &value, sizeof value);
        memcpy(at + 1 + sizeof value, PyBytes_AS_STRING(text.bytes), described);
        memcpy(at + 1 + sizeof value + described, tensor.data, inside);
    }
    Py_XDECREF(text.bytes);
    return at != NULL ? 1 : -1;
}

/* Write a value: 1, 0 if it is unusual, -1 with an exception. Other threads may run in between and change containers. */
static int write_value(Writer *to, PyObject *value, int depth) {
    if (depth > DEEPEST) return 0;
    if (value == Py_None) return write_head(to, 0xC0, 0, 0) < 0 ? -1 : 1;
    if (value == Py_True || value == Py_False) return write_head(to, value == Py_True ? 0xC3 : 0xC2, 0, 0) < 0 ? -1 : 1;
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t nbytes;
        const char *text = PyUnicode_AsUTF8AndSize(value, &nbytes);
        if (text == NULL || (size_t)nbytes > UINT32_MAX) {
            PyErr_Clear();
            return 0;
        }
        return write_text(to, text, (size_t)nbytes) < 0 ? -1 : 1;
    }
    if (PyLong_CheckExact(value)) {
        int over;
        long long number = PyLong_AsLongLongAndOverflow(value, &over);
        if (over == 0) return (number < 0 ? write_negative(to, number) : write_positive(to, (uint64_t)number)) < 0 ? -1 : 1;
        unsigned long long positive = over > 0 ? PyLong_AsUnsignedLongLong(value) : 0;
        if (over < 0 || PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
        return write_positive(to, positive) < 0 ? -1 : 1;
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return write_head(to, 0xCB, bits, 8) < 0 ? -1 : 1;
    }
    int done = 1;
    if (PyDict_CheckExact(value)) {
        Py_ssize_t count = PyDict_GET_SIZE(value), at = 0, written = 0;
        if (write_length(to, (size_t)count, 0x80, 16, 0, 0xDE) < 0) return -1;
        for (PyObject *key, *item; done > 0 && PyDict_Next(value, &at, &key, &item); written++) {
            if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return 0;
            Py_INCREF(key);
            Py_INCREF(item);
            done = write_value(to, key, depth + 1);
            if (done > 0) done = write_value(to, item, depth + 1);
            Py_DECREF(key);
            Py_DECREF(item);
        }
        return done > 0 && written != count ? 0 : done;
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(value), i = 0;
        if (write_length(to, (size_t)count, 0x90, 16, 0, 0xDC) < 0) return -1;
        for (; done > 0 && i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            done = write_value(to, item, depth + 1);
            Py_DECREF(item);
        }
        return done > 0 && i != count ? 0 : done;
    }
    if (depth && PyBytes_CheckExact(value)) { /* alone, they are a buffer */
        size_t nbytes = (size_t)PyBytes_GET_SIZE(value);
        if (nbytes > UINT32_MAX) return 0;
        if (write_length(to, nbytes, 0, 0, 0xC4, 0xC5) < 0) return -1;
        return write_bytes(to, PyBytes_AS_STRING(value), nbytes) < 0 ? -1 : 1;
    }
    return write_tensor(to, value);
}

PyDoc_STRVAR(pack_doc, "pack(payload, embedded)\n--\n\n"
                       "Return the body of a payload, its buffers and its longest array, as `Packer.pack`.\n\n"
                       "None if it has anything but plain data and plain tensors.\n\n"
                       "Args:\n    embedded: most bytes of a tensor in the body.");

static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "a payload and a number of bytes expected");
    Py_ssize_t embedded = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    Writer to = {PyBytes_FromStringAndSize(NULL, 1024), PyList_New(0), embedded, 0, 0, 0, 0};
    PyObject *result = NULL;
    int done = to.bytes == NULL || to.buffers == NULL ? -1 : write_value(&to, args[0], 0);
    if (done == 0)
        result = Py_NewRef(Py_None);
    else if (done > 0 && _PyBytes_Resize(&to.bytes, (Py_ssize_t)to.used) == 0)
        result = to.longest_bytes ? Py_BuildValue("(OO(si))", to.bytes, to.buffers, dtypes[to.longest].name, to.longest_ndim)
                                  : Py_BuildValue("(OOO)", to.bytes, to.buffers, Py_None);
    Py_XDECREF(to.bytes);
    Py_XDECREF(to.buffers);
    return result;
}

/* Fronts of messages: connectors/framing */

/* Write a message to `room` bytes: buffers, header, table, name and body. 1; 0 with nothing written if a buffer is unusual;
   -1 with an exception. */
static int write_message(uint8_t *to, size_t room, PyObject *message, uint64_t generation, int checked) {
    PyObject *name = PyObject_GetAttr(message, s_name), *body = PyObject_GetAttr(message, s_body);
    PyObject *buffers = PyObject_GetAttr(message, s_buffers), *places = PyObject_GetAttr(message, s_places);
    PyObject *numbers[] = {PyObject_GetAttr(message, s_flags), PyObject_GetAttr(message, s_id),
                           PyObject_GetAttr(message, s_nbytes)};
    int done = -1;
    if (!name || !body || !buffers || !places || !numbers[0] || !numbers[1] || !numbers[2]) goto done;
    if (!PyBytes_Check(name) || !PyBytes_Check(body) || !PyList_Check(buffers) || !PyList_Check(places) ||
        PyList_GET_SIZE(buffers) != PyList_GET_SIZE(places)) {
        PyErr_SetString(PyExc_TypeError, "not a message");
        goto done;
    }
    uint16_t flags = (uint16_t)PyLong_AsUnsignedLong(numbers[0]);
    uint64_t id = PyLong_AsUnsignedLongLong(numbers[1]), nbytes = PyLong_AsUnsignedLongLong(numbers[2]);
    if (PyErr_Occurred()) goto done;
    size_t in_name = (size_t)PyBytes_GET_SIZE(name), in_body = (size_t)PyBytes_GET_SIZE(body);
    size_t count = (size_t)PyList_GET_SIZE(places), table = sizeof(Place) * count;
    /* lengths are below 2^63, so a sum of two does not overflow; the table is checked first */
    if (room < sizeof(Head) || table > room - sizeof(Head) || in_name > UINT32_MAX || in_body > UINT32_MAX ||
        in_name + in_body > room - sizeof(Head) - table || nbytes > room) {
        PyErr_SetString(PyExc_ValueError, "a message does not fit");
        goto done;
    }
    uint8_t *end = to + sizeof(Head) + table + in_name + in_body;
    for (int copy = 0; copy < 2; copy++) /* first, whether all buffers can be copied */
        for (size_t i = 0; i < count; i++) {
            PyObject *pair = PyList_GET_ITEM(places, (Py_ssize_t)i);
            if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
                PyErr_SetString(PyExc_TypeError, "a place is a tuple of offset and bytes");
                goto done;
            }
            Place place = {PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(pair, 0)),
                           PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(pair, 1))};
            if (PyErr_Occurred()) goto done;
            if (place.nbytes > room || place.at > room - place.nbytes || place.at < (size_t)(end - to)) {
                PyErr_SetString(PyExc_ValueError, "a message does not fit");
                goto done;
            }
            Tensor tensor;
            size_t there, dtype;
            if (!look_at(PyList_GET_ITEM(buffers, (Py_ssize_t)i), &tensor, &there, &dtype) || there != place.nbytes) {
                done = 0;
                goto done;
            }
            if (copy) {
                memcpy(to + sizeof(Head) + i * sizeof place, &place, sizeof place);
                memcpy(to + place.at, tensor.data, there);
            }
        }
    uint32_t of_buffers = 0, sum;
    for (size_t i = 0; checked && i < count; i++) {
        Place place;
        memcpy(&place, to + sizeof(Head) + i * sizeof place, sizeof place);
        if (add_to_checksum(to + place.at, place.nbytes, &of_buffers) < 0) goto done;
    }
    memcpy(to + sizeof(Head) + table, PyBytes_AS_STRING(name), in_name);
    memcpy(to + sizeof(Head) + table + in_name, PyBytes_AS_STRING(body), in_body);
    Head head = {0, MAGIC, VERSION, flags | (checked ? CHECKED : 0), (uint32_t)in_name, (uint32_t)in_body, (uint32_t)count,
                 generation, nbytes, id, of_buffers};
    memcpy(to, &head, sizeof head);
    if (checksum_of(to + sizeof sum, (size_t)(end - to) - sizeof sum, &sum) < 0) goto done;
    memcpy(to, &sum, sizeof sum);
    done = 1;
done:
    Py_XDECREF(name);
    Py_XDECREF(body);
    Py_XDECREF(buffers);
    Py_XDECREF(places);
    for (int i = 0; i < 3; i++) Py_XDECREF(numbers[i]);
    return done;
}

PyDoc_STRVAR(write_doc, "write(target, message, generation, checked)\n--\n\n"
                        "Write a message; return False, with nothing written, if a buffer is no plain tensor on the host.");

static PyObject *write_to(PyObject *module, PyObject *args) {
    Py_buffer target;
    PyObject *message;
    unsigned long long generation;
    int checked;
    if (!PyArg_ParseTuple(args, "w*OKp", &target, &message, &generation, &checked)) return NULL;
    int done = write_message(target.buf, (size_t)target.len, message, generation, checked);
    PyBuffer_Release(&target);
    return done < 0 ? NULL : PyBool_FromLong(done);
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
    const char *data = PyBytes_AS_STRING(body), *end = data + PyBytes_GET_SIZE(body);
#define HAS(from, word) (memmem(from, (size_t)(end - from), word, sizeof word - 1) != NULL)
    const char *finish = memmem(data, (size_t)(end - data), "finish", 6); /* two of the words begin with it */
    int found = finish != NULL && ((HAS(finish, "finished") && (HAS(data, "final_output_type") || HAS(data, "images"))) ||
                                   (HAS(finish, "finish_reason") && HAS(data, "token_ids")));
#undef HAS
    return PyBool_FromLong(found);
}

/* Payloads of messages: `Opener` of connectors/framing/arrival.py */

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

typedef struct {
    const uint8_t *at, *end;
    PyObject *places;
} Reader;

static int read_number(Reader *from, int nbytes, uint64_t *value) { /* big endian; 0 if the data ends before */
    if (from->end - from->at < nbytes) return 0;
    *value = 0;
    for (int i = 0; i < nbytes; i++) *value = *value << 8 | *from->at++;
    return 1;
}

/* Read a length below which a byte has it, or that follows one of the codes with 1, 2 or 4 bytes; 0 if it is none. */
static int read_length(Reader *from, uint8_t small, uint8_t mask, uint8_t one, uint8_t two, uint64_t *length) {
    if (from->at == from->end) return 0;
    uint8_t code = *from->at++;
    if (small && (code & ~mask) == small) {
        *length = code & mask;
        return 1;
    }
    if (one && code == one) return read_number(from, 1, length);
    return code == two ? read_number(from, 2, length) : code == two + 1 ? read_number(from, 4, length) : 0;
}

/* Return the tensor that an extension describes: a view of its buffer, or of a copy of its data. NULL if anything is
   unusual, with an exception on failure. */
static PyObject *read_tensor(const uint8_t *at, size_t length, PyObject *places) {
    Value value;
    if (tensor_type == NULL || length < sizeof value) return NULL;
    memcpy(&value, at, sizeof value);
    size_t start = sizeof value + value.described;
    if (length < start) return NULL;
    Reader from = {at + sizeof value, at + start, NULL};
    uint64_t in_name, ndim;
    if (from.at == from.end || *from.at++ != 0x92) return NULL;
    if (!read_length(&from, 0xA0, 0x1F, 0xD9, 0xDA, &in_name) || (size_t)(from.end - from.at) < in_name) return NULL;
    size_t dtype = 0;
    while (strlen(dtypes[dtype].name) != in_name || memcmp(dtypes[dtype].name, from.at, in_name))
        if (++dtype == DTYPES) return NULL;
    from.at += in_name;
    if (!read_length(&from, 0x90, 0x0F, 0, 0xDC, &ndim) || ndim > MOST_DIMENSIONS) return NULL;
    int64_t shape[MOST_DIMENSIONS], count = 1, extent = 1; /* extent: with 1 in place of 0 */
    for (uint64_t i = 0; i < ndim; i++) {
        uint64_t size;
        if (from.at == from.end) return NULL;
        uint8_t code = *from.at++;
        if (code < 0x80)
            size = code;
        else if (code < 0xCC || code > 0xCF || !read_number(&from, 1 << (code - 0xCC), &size))
            return NULL;
        if (size > INT64_MAX || __builtin_mul_overflow(extent, size ? (int64_t)size : 1, &extent)) return NULL;
        count *= (int64_t)size;
        shape[i] = (int64_t)size;
    }
    int bits = dtypes[dtype].bits;
    if (from.at != from.end || extent > PY_SSIZE_T_MAX / 32 || dtypes[dtype].object == NULL) return NULL;
    unsigned long long expected = (unsigned long long)count * (unsigned)(bits / 8), offset = 0, nbytes = length - start;
    PyObject *source = NULL;
    if (value.buffer != HERE) {
        if ((Py_ssize_t)value.buffer >= PyList_GET_SIZE(places)) return NULL;
        PyObject *place = PyList_GET_ITEM(places, (Py_ssize_t)value.buffer);
        if (!PyTuple_Check(place) || !PyArg_ParseTuple(place, "OKK", &source, &offset, &nbytes)) return NULL;
    }
    if (nbytes != expected || (source != NULL && !nbytes)) return NULL;
    Block *block = PyMem_RawMalloc(sizeof(Block) + 2 * sizeof(int64_t) * ndim + (source == NULL ? nbytes + ALIGNMENT : 0));
    if (block == NULL) return PyErr_NoMemory();
    memset(block, 0, sizeof *block);
    int64_t *strides = block->sizes + ndim, stride = 1;
    for (uint64_t i = ndim; i-- > 0; stride *= shape[i] ? shape[i] : 1) block->sizes[i] = shape[i], strides[i] = stride;
    Tensor *tensor = &block->managed.tensor;
    if (source == NULL) {
        uintptr_t after = (uintptr_t)(strides + ndim);
        tensor->data = (uint8_t *)((after + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        memcpy(tensor->data, at + start, (size_t)nbytes);
    } else {
        if (PyObject_GetBuffer(source, &block->buffer, PyBUF_WRITABLE) < 0) { /* a tensor on a device, or read-only */
            PyErr_Clear();
            PyMem_RawFree(block);
            return NULL;
        }
        if ((unsigned long long)block->buffer.len < nbytes || offset > (unsigned long long)block->buffer.len - nbytes) {
            delete_block(&block->managed);
            return NULL;
        }
        tensor->data = (uint8_t *)block->buffer.buf + offset;
    }
    tensor->device_type = ON_CPU;
    tensor->ndim = (int32_t)ndim;
    tensor->code = dtypes[dtype].code;
    tensor->bits = (uint8_t)bits;
    tensor->lanes = 1;
    tensor->shape = block->sizes;
    tensor->strides = strides;
    block->managed.major = 1;
    block->managed.deleter = delete_block;
    void *made = NULL;
    if (torch->to_object(&block->managed, &made) != 0) { /* it may have the memory, which is then not freed */
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch cannot make a tensor");
        return NULL;
    }
    return made;
}

static PyObject *read_text(Reader *from, uint64_t nbytes) {
    if ((uint64_t)(from->end - from->at) < nbytes) return NULL;
    from->at += nbytes;
    PyObject *text = PyUnicode_DecodeUTF8((const char *)from->at - nbytes, (Py_ssize_t)nbytes, NULL);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    return text;
}

/* Read a value; NULL if it is unusual or damaged, with an exception on failure. */
static PyObject *read_value(Reader *from, int depth) {
    if (depth > DEEPEST || from->at == from->end) return NULL;
    uint8_t code = *from->at;
    uint64_t number;
    if ((code & 0xE0) == 0xA0 || (code >= 0xD9 && code <= 0xDB))
        return read_length(from, 0xA0, 0x1F, 0xD9, 0xDA, &number) ? read_text(from, number) : NULL;
    if ((code & 0xF0) == 0x80 || code == 0xDE || code == 0xDF) {
        if (!read_length(from, 0x80, 0x0F, 0, 0xDE, &number)) return NULL;
        PyObject *map = PyDict_New();
        for (uint64_t i = 0; map != NULL && i < number; i++) {
            PyObject *key = read_value(from, depth + 1), *item = NULL;
            if (key != NULL && (PyUnicode_CheckExact(key) || PyLong_CheckExact(key))) item = read_value(from, depth + 1);
            if (item == NULL || PyDict_SetItem(map, key, item) < 0) Py_CLEAR(map);
            Py_XDECREF(key);
            Py_XDECREF(item);
        }
        return map;
    }
    if ((code & 0xF0) == 0x90 || code == 0xDC || code == 0xDD) {
        if (!read_length(from, 0x90, 0x0F, 0, 0xDC, &number)) return NULL;
        if ((uint64_t)(from->end - from->at) < number) return NULL; /* each takes a byte at least */
        PyObject *list = PyList_New((Py_ssize_t)number);
        for (uint64_t i = 0; list != NULL && i < number; i++) {
            PyObject *item = read_value(from, depth + 1);
            if (item == NULL)
                Py_CLEAR(list);
            else
                PyList_SET_ITEM(list, (Py_ssize_t)i, item);
        }
        return list;
    }
    from->at++;
    if (code < 0x80) return PyLong_FromLong(code);
    if (code >= 0xE0) return PyLong_FromLong((int8_t)code);
    switch (code) {
    case 0xC0:
        return Py_NewRef(Py_None);
    case 0xC2:
        return Py_NewRef(Py_False);
    case 0xC3:
        return Py_NewRef(Py_True);
    case 0xCB: {
        double value;
        if (!read_number(from, 8, &number)) return NULL;
        memcpy(&value, &number, sizeof value);
        return PyFloat_FromDouble(value);
    }
    case 0xCC:
    case 0xCD:
    case 0xCE:
    case 0xCF:
        return read_number(from, 1 << (code - 0xCC), &number) ? PyLong_FromUnsignedLongLong(number) : NULL;
    case 0xD0:
    case 0xD1:
    case 0xD2:
    case 0xD3: {
        int unused = 64 - (8 << (code - 0xD0));
        if (!read_number(from, 1 << (code - 0xD0), &number)) return NULL;
        return PyLong_FromLongLong((int64_t)(number << unused) >> unused);
    }
    case 0xC4:
    case 0xC5:
    case 0xC6:
        if (!read_number(from, 1 << (code - 0xC4), &number) || (uint64_t)(from->end - from->at) < number) return NULL;
        from->at += number;
        return PyBytes_FromStringAndSize((const char *)from->at - number, (Py_ssize_t)number);
    case 0xC7:
    case 0xC8:
    case 0xC9:
    case 0xD8:
        number = 16;
        if (code != 0xD8 && !read_number(from, 1 << (code - 0xC7), &number)) return NULL;
        if (from->at == from->end || *from->at++ != TENSOR || (uint64_t)(from->end - from->at) < number) return NULL;
        from->at += number;
        return read_tensor(from->at - number, (size_t)number, from->places);
    default:
        return NULL;
    }
}

PyDoc_STRVAR(unpack_doc, "unpack(body, places)\n--\n\n"
                         "Return the payload of a message, as `Opener.open`.\n\n"
                         "NotImplemented if it has anything but plain data and tensors on the host, or is damaged.");

static PyObject *unpack(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_buffer body;
    if (count != 2 || !PyList_Check(args[1])) return PyErr_Format(PyExc_TypeError, "a body and a list of places expected");
    if (PyObject_GetBuffer(args[0], &body, PyBUF_SIMPLE) < 0) return NULL;
    Reader from = {body.buf, (const uint8_t *)body.buf + body.len, args[1]};
    PyObject *payload = read_value(&from, 0);
    if (payload != NULL && from.at != from.end) Py_CLEAR(payload);
    PyBuffer_Release(&body);
    if (payload != NULL || PyErr_Occurred()) return payload;
    return Py_NewRef(Py_NotImplemented);
}

/* Digests of names: BLAKE2b with 8 bytes, as `layout.new_digest` of connectors/arena */

static const uint64_t blake_start[8] = {0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
                                        0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u};
static const uint8_t blake_order[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static uint64_t rotated(uint64_t value, int by) { return value >> by | value << (64 - by); }

static void blake_mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = rotated(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 63);
}

static uint64_t digest_of(const uint8_t *data, size_t nbytes) {
    uint64_t h[8], m[16], v[16];
    memcpy(h, blake_start, sizeof h);
    h[0] ^= 0x01010008;
    for (size_t before = 0;;) {
        size_t part = nbytes - before < sizeof m ? nbytes - before : sizeof m;
        memset(m, 0, sizeof m);
        if (part) memcpy(m, data + before, part);
        before += part;
        memcpy(v, h, sizeof h);
        memcpy(v + 8, blake_start, sizeof h);
        v[12] ^= before;
        if (before == nbytes) v[14] = ~v[14];
        for (int round = 0; round < 12; round++) {
            const uint8_t *o = blake_order[round];
            for (int i = 0; i < 4; i++) blake_mix(v, i, 4 + i, 8 + i, 12 + i, m[o[2 * i]], m[o[2 * i + 1]]);
            for (int i = 0; i < 4; i++)
                blake_mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[o[8 + 2 * i]], m[o[9 + 2 * i]]);
        }
        for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[8 + i];
        if (before == nbytes) return h[0] ? h[0] : 1;
    }
}

PyDoc_STRVAR(digest_doc, "digest(name)\n--\n\nSee `layout.new_digest`.");

static PyObject *digest(PyObject *module, PyObject *name) {
    if (!PyBytes_Check(name)) return PyErr_Format(PyExc_TypeError, "bytes expected");
    return PyLong_FromUnsignedLongLong(digest_of((const uint8_t *)PyBytes_AS_STRING(name), (size_t)PyBytes_GET_SIZE(name)));
}

PyDoc_STRVAR(wake_doc, "wake(words, word)\n--\n\nSee `WakeWords.wake`.");

static PyObject *wake(PyObject *module, PyObject *args) {
    Py_buffer words;
    Py_ssize_t word;
    if (!PyArg_ParseTuple(args, "w*n", &words, &word)) return NULL;
    int inside = word >= 0 && word < words.len / 4 && !((uintptr_t)words.buf % 4);
    if (inside) {
        uint32_t *at = (uint32_t *)words.buf + word;
        __atomic_add_fetch(at, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, at, 1, INT32_MAX, NULL, NULL, 0); /* FUTEX_WAKE, which never waits */
    }
    PyBuffer_Release(&words);
    if (inside) Py_RETURN_NONE;
    return PyErr_Format(PyExc_IndexError, "no such word");
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

/* Set `slots` to those with this digest whose message waits, in order; return how many, at most two buckets. */
static int waiting_slots(Slots *self, uint64_t digest, uint32_t slots[2 * BUCKET]) {
    uint64_t mask = self->slots / BUCKET - 1, buckets[2] = {digest & mask, (digest >> 32) & mask};
    int count = 0;
    for (int i = 0; i < 1 + (buckets[0] != buckets[1]); i++)
        for (uint64_t slot = buckets[i] * BUCKET; slot < (buckets[i] + 1) * BUCKET; slot++)
            if (__atomic_load_n(digest_at(self, slot), __ATOMIC_RELAXED) == digest &&
                state_of(record_at(self, slot)) == READY)
                slots[count++] = (uint32_t)slot;
    return count;
}

PyDoc_STRVAR(find_doc, "find(digest)\n--\n\nSee `Index.find`.");

static PyObject *slots_find(Slots *self, PyObject *number) {
    unsigned long long digest = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() || !has_slot(self, 0)) return NULL;
    uint32_t slots[2 * BUCKET];
    int count = waiting_slots(self, digest, slots);
    PyObject *found = PyList_New(count);
    for (int i = 0; found != NULL && i < count; i++) {
        PyObject *slot = PyLong_FromLong((long)slots[i]);
        if (slot == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, i, slot);
    }
    return found;
}

static void publish_slot(Slots *self, uint64_t slot, uint64_t digest, const Record *made) {
    Record *record = record_at(self, slot);
    memcpy((uint8_t *)record + sizeof(uint32_t), (uint8_t *)made + sizeof(uint32_t), offsetof(Record, unused) - 4);
    __atomic_store_n(digest_at(self, slot), digest, __ATOMIC_RELAXED);
    set_state(record, READY);
    uint32_t *news = (uint32_t *)((uint8_t *)self->map.buf + NEWS_AT) + digest % NEWS_KINDS;
    __atomic_add_fetch(news, 1, __ATOMIC_RELEASE);
}

PyDoc_STRVAR(publish_doc, "publish(slot, digest, generation, pool, offset, nbytes, put_at)\n--\n\nSee `Index.publish`.");

static PyObject *slots_publish(Slots *self, PyObject *args) {
    unsigned long long slot, digest, offset, nbytes;
    unsigned int generation, pool;
    double put_at;
    if (!PyArg_ParseTuple(args, "KKIIKKd", &slot, &digest, &generation, &pool, &offset, &nbytes, &put_at)) return NULL;
    if (!has_slot(self, slot)) return NULL;
    Record made = {FREE, generation, pool, 0, offset, nbytes, 0, put_at, {0}};
    publish_slot(self, slot, digest, &made);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(send_doc,
             "send(message, free, offset, nbytes, generation, checked, clock)\n--\n\n"
             "Write a message to the ring and publish it, as `Outbox.put`: return its slot and when it was put.\n\n"
             "None, with nothing shown, if no slot is free, or a buffer is no plain tensor on the host.\n\n"
             "Args:\n    free: for each bucket, its free slots.");

static PyObject *slots_send(Slots *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 7 || !PyList_Check(args[1])) return PyErr_Format(PyExc_TypeError, "seven arguments expected");
    uint64_t offset = PyLong_AsUnsignedLongLong(args[2]), nbytes = PyLong_AsUnsignedLongLong(args[3]);
    uint64_t generation = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred() || !has_slot(self, 0)) return NULL;
    uint64_t room = (uint64_t)self->map.len - self->ring;
    if (nbytes > room || offset > room - nbytes || generation > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a message does not fit");
        return NULL;
    }
    PyObject *name = PyObject_GetAttr(args[0], s_name);
    if (name == NULL) return NULL;
    if (!PyBytes_Check(name)) {
        Py_DECREF(name);
        return PyErr_Format(PyExc_TypeError, "not a message");
    }
    uint64_t digest = digest_of((const uint8_t *)PyBytes_AS_STRING(name), (size_t)PyBytes_GET_SIZE(name));
    Py_DECREF(name);
    Py_ssize_t mask = (Py_ssize_t)(self->slots / BUCKET - 1), one = (Py_ssize_t)digest & mask;
    Py_ssize_t other = (Py_ssize_t)(digest >> 32) & mask;
    if (mask >= PyList_GET_SIZE(args[1])) return PyErr_Format(PyExc_ValueError, "not the free slots of this index");
    PyObject *free = PyList_GET_ITEM(args[1], one), *others = PyList_GET_ITEM(args[1], other);
    if (!PyList_Check(free) || !PyList_Check(others)) return PyErr_Format(PyExc_TypeError, "lists of slots expected");
    if (PyList_GET_SIZE(others) > PyList_GET_SIZE(free)) free = others;
    Py_ssize_t left = PyList_GET_SIZE(free);
    if (!left) Py_RETURN_NONE;
    PyObject *number = PyList_GET_ITEM(free, left - 1);
    uint64_t slot = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() || !has_slot(self, slot)) return NULL;
    int checked = PyObject_IsTrue(args[5]);
    uint8_t *at = (uint8_t *)self->map.buf + self->ring + offset;
    int done = checked < 0 ? -1 : write_message(at, nbytes, args[0], generation, checked);
    if (done <= 0) return done < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *now = PyObject_CallNoArgs(args[6]), *result = now == NULL ? NULL : PyTuple_New(2);
    double put_at = now == NULL ? -1 : PyFloat_AsDouble(now);
    /* other threads do not send meanwhile, by the lock of the transport */
    if (result == NULL || PyErr_Occurred() || PyList_GET_SIZE(free) != left) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "two threads send at once");
        Py_XDECREF(now);
        Py_XDECREF(result);
        return NULL;
    }
    PyTuple_SET_ITEM(result, 0, Py_NewRef(number));
    PyTuple_SET_ITEM(result, 1, now);
    if (PyList_SetSlice(free, left - 1, left, NULL) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    Record made = {FREE, (uint32_t)generation, RING, 0, offset, nbytes, 0, put_at, {0}};
    publish_slot(self, slot, digest, &made);
    return result;
}

static int lock_byte(Slots *self, uint64_t slot, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)(self->records + slot * sizeof(Record)),
                         .l_len = 1};
    return fcntl(self->fd, F_OFD_SETLK, &lock);
}

/* Take a message out of the ring, as `Index.take`: return a copy, its checked front and when it was put. None if it is not
   available, or locked; False, with nothing changed, if it is damaged. */
static PyObject *take_slot(Slots *self, uint64_t slot, uint64_t digest, const char *name, size_t in_name) {
    PyObject *result = NULL, *data = NULL, *front = NULL;
    if (lock_byte(self, slot, F_WRLCK) < 0) {
        if (errno == EAGAIN || errno == EACCES) Py_RETURN_NONE;
        return PyErr_SetFromErrno(PyExc_OSError);
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
    front = front_of((uint8_t *)PyByteArray_AS_STRING(data), (size_t)record.nbytes, name, in_name, &made);
    if (front == Py_None)
        result = Py_NewRef(Py_False);
    else if (front != NULL && (result = Py_BuildValue("(OOd)", data, front, record.put_at)) != NULL)
        set_state(shared, CONSUMED); /* nothing can fail any more */
unlock:
    lock_byte(self, slot, F_UNLCK);
    Py_XDECREF(data);
    Py_XDECREF(front);
    return result;
}

PyDoc_STRVAR(receive_doc,
             "receive(digest, name, mutex)\n--\n\n"
             "Find a message and take it out of the ring: return a copy, its checked front and when it was put.\n\n"
             "None if no message of this digest waits; False, with nothing changed, if it cannot be taken in this way.\n\n"
             "Args:\n    mutex: excludes other threads of this process while a slot is locked.");

static PyObject *slots_receive(Slots *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyBytes_Check(args[1])) return PyErr_Format(PyExc_TypeError, "digest, name and mutex expected");
    uint64_t digest = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred() || !has_slot(self, 0)) return NULL;
    uint32_t slots[2 * BUCKET];
    int found = waiting_slots(self, digest, slots);
    if (!found) Py_RETURN_NONE;
    if (found > 1 || __atomic_load_n(&record_at(self, slots[0])->pool, __ATOMIC_RELAXED) != RING) Py_RETURN_FALSE;
    PyObject *with[] = {args[2], Py_False}, *locked = PyObject_VectorcallMethod(s_acquire, with, 2, NULL);
    if (locked != Py_True) {
        if (locked == NULL) return NULL;
        Py_DECREF(locked);
        Py_RETURN_FALSE;
    }
    Py_DECREF(locked);
    PyObject *taken = take_slot(self, slots[0], digest, PyBytes_AS_STRING(args[1]), (size_t)PyBytes_GET_SIZE(args[1]));
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace); /* of `take_slot` */
    PyObject *unlocked = PyObject_CallMethodNoArgs(args[2], s_release);
    Py_XDECREF(unlocked);
    if (unlocked == NULL) {
        Py_CLEAR(taken);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
        return NULL;
    }
    PyErr_Restore(type, error, trace);
    if (taken == Py_None) {
        Py_DECREF(taken);
        Py_RETURN_FALSE;
    }
    return taken;
}

static PyMethodDef slots_methods[] = {
    {"find", (PyCFunction)slots_find, METH_O, find_doc},
    {"publish", (PyCFunction)slots_publish, METH_VARARGS, publish_doc},
    {"send", (PyCFunction)(void (*)(void))slots_send, METH_FASTCALL, send_doc},
    {"receive", (PyCFunction)(void (*)(void))slots_receive, METH_FASTCALL, receive_doc},
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
    {"use_torch", use_torch, METH_O, use_torch_doc},
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, pack_doc},
    {"write", write_to, METH_VARARGS, write_doc},
    {"read_front", read_front, METH_VARARGS, read_front_doc},
    {"unpack", (PyCFunction)(void (*)(void))unpack, METH_FASTCALL, unpack_doc},
    {"may_hold_outputs", may_hold_outputs, METH_O, may_hold_outputs_doc},
    {"digest", digest, METH_O, digest_doc},
    {"wake", wake, METH_VARARGS, wake_doc},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_messages", "Steps of small messages, compiled. See `vllm_omni_sched.connectors.native`.", -1,
    functions};

PyMODINIT_FUNC PyInit__messages(void) {
    PyObject *module = PyModule_Create(&definition), *zlib = PyImport_ImportModule("zlib");
    if (module == NULL || zlib == NULL) goto failed;
    crc32 = PyObject_GetAttrString(zlib, "crc32");
    PyObject *type = PyType_FromSpec(&slots_spec);
    if (crc32 == NULL || type == NULL) goto failed;
    struct {
        PyObject **name;
        const char *text;
    } names[] = {{&s_dtype, "dtype"},     {&s_is_neg, "is_neg"}, {&s_is_conj, "is_conj"}, {&s_acquire, "acquire"},
                 {&s_release, "release"}, {&s_name, "name"},     {&s_body, "body"},       {&s_buffers, "buffers"},
                 {&s_places, "_places"},  {&s_flags, "flags"},   {&s_id, "id"},           {&s_nbytes, "nbytes"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL) goto failed;
    if (PyModule_AddObject(module, "Slots", type) < 0 || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        goto failed;
    Py_DECREF(zlib);
    return module;
failed:
    Py_XDECREF(zlib);
    Py_XDECREF(module);
    return NULL;
}

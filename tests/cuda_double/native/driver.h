/* What the files of the double of the driver share. */
#include "double.h"

enum { CUDA_SUCCESS = 0 };
typedef void *context_t; /* of a primary context the number of the device + 1, of a green one its address */

static inline bool is_primary(context_t context) { return (uintptr_t)context <= MAX_DEVICES; }
static inline int device_of(context_t primary) { return (int)(uintptr_t)primary - 1; }

/* green.c */
context_t current_green(void); /* NULL: the primary context is current */
int make_green_current(context_t context);

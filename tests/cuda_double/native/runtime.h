/* Calls from the doubles of the driver and of the video decoder to that of the runtime, which the program has loaded. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

/* Return a function of the runtime. Without the runtime there is nothing to call, so that the program ends. */
static void *of_runtime(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        fprintf(stderr, "the CUDA double has no %s: load its libcudart.so.13 first, as torch does\n", name);
        abort();
    }
    return function;
}

/* Return an error of the driver, of which the runtime is not told. */
static int __attribute__((unused)) not_of_runtime(int error)
{
    static int (*forget)(void);
    if (!forget)
        forget = (int (*)(void))of_runtime("cudaGetLastError");
    if (error)
        forget();
    return error;
}

/* Call a function of the runtime by its name, with arguments of these types. */
#define RUNTIME(name, types, ...)                                                                                      \
    ({                                                                                                                 \
        static int(*function) types;                                                                                   \
        if (!function)                                                                                                 \
            function = (int(*) types)of_runtime(#name);                                                                \
        not_of_runtime(function(__VA_ARGS__));                                                                         \
    })

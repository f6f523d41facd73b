/* libcuda.so.1: what torch asks of the driver itself. The rest is made by build.py, and refuses. */
#define API __attribute__((visibility("default")))
enum { CUDA_SUCCESS = 0 };

API int cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }

API int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return CUDA_SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    (void)device;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

API int cuGetErrorString(int error, const char **text)
{
    (void)error;
    *text = "the CUDA double has no such operation of the driver";
    return CUDA_SUCCESS;
}

/* libnvidia-encode.so.1: PyNvVideoCodec asks it for the version of the driver, and loads its own binary by that. */
#define API __attribute__((visibility("default")))
enum { SUCCESS = 0, VERSION = 13 << 4, UNSUPPORTED = 15 };

API int NvEncodeAPIGetMaxSupportedVersion(unsigned *version)
{
    *version = VERSION;
    return SUCCESS;
}

API int NvEncodeAPICreateInstance(void) { return UNSUPPORTED; }

/* libnvidia-ml.so.1: figures from the file that CUDA_DOUBLE_NVML names, read at each call.
 *
 * Each line is a key and a number: `count 2`, `0.gpu 40`, `0.used 1024`. A negative number is an error of NVML: `init
 * -9` (driver not loaded), `0.decoder -3` (not supported), `1.handle -15` (the device is lost). What is not in the file
 * has a usual value.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 8
typedef int nvmlReturn_t;
enum { NVML_SUCCESS = 0, NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3 };

struct nvmlDevice { int index; };
static struct nvmlDevice nvml_devices[MAX_DEVICES];
struct nvmlMemory { unsigned long long total, free, used; };
struct nvmlUtilization { unsigned gpu, memory; };

static long long figure(const char *key, long long usual)
{
    const char *name = getenv("CUDA_DOUBLE_NVML");
    FILE *file = name ? fopen(name, "r") : NULL;
    char line[128], found[64];
    long long value, result = usual;
    if (!file)
        return usual;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %lld", found, &value) == 2 && !strcmp(found, key))
            result = value;
    fclose(file);
    return result;
}

static long long of_device(struct nvmlDevice *device, const char *key, long long usual)
{
    char name[64];
    snprintf(name, sizeof name, "%d.%s", device->index, key);
    return figure(name, usual);
}

API nvmlReturn_t nvmlInit_v2(void)
{
    long long error = figure("init", 0);
    return error < 0 ? (nvmlReturn_t)-error : NVML_SUCCESS;
}

API nvmlReturn_t nvmlInitWithFlags(unsigned flags) { return (void)flags, nvmlInit_v2(); }
API nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }

API const char *nvmlErrorString(nvmlReturn_t error)
{
    static const char *const texts[] = {[0] = "Success", [2] = "Invalid Argument", [3] = "Not Supported",
                                        [9] = "Driver Not Loaded", [15] = "GPU is lost", [999] = "Unknown Error"};
    return error >= 0 && error < 1000 && texts[error] ? texts[error] : "Unknown Error";
}

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    long long found = figure("count", 2);
    *count = found < 0 ? 0 : (unsigned)found;
    return found < 0 ? (nvmlReturn_t)-found : NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, struct nvmlDevice **device)
{
    if (index >= MAX_DEVICES || index >= figure("count", 2))
        return NVML_INVALID;
    nvml_devices[index].index = (int)index;
    *device = &nvml_devices[index];
    long long error = of_device(*device, "handle", 0);
    return error < 0 ? (nvmlReturn_t)-error : NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetUUID(struct nvmlDevice *device, char *text, unsigned size)
{
    snprintf(text, size, "GPU-63756461-2d64-6f75-626c-652d7575693%d", device->index);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetName(struct nvmlDevice *device, char *text, unsigned size)
{
    snprintf(text, size, "CUDA double %d", device->index);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(struct nvmlDevice *device, struct nvmlMemory *memory)
{
    long long total = of_device(device, "total", 256 << 20), used = of_device(device, "used", 1 << 20);
    if (total < 0 || used < 0)
        return (nvmlReturn_t)-(total < 0 ? total : used);
    *memory = (struct nvmlMemory){(unsigned long long)total, (unsigned long long)(total - used),
                                  (unsigned long long)used};
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetUtilizationRates(struct nvmlDevice *device, struct nvmlUtilization *rates)
{
    long long gpu = of_device(device, "gpu", 0), memory = of_device(device, "memory", 0);
    if (gpu < 0 || memory < 0)
        return (nvmlReturn_t)-(gpu < 0 ? gpu : memory);
    *rates = (struct nvmlUtilization){(unsigned)gpu, (unsigned)memory};
    return NVML_SUCCESS;
}

static nvmlReturn_t coder(struct nvmlDevice *device, const char *key, unsigned *percent, unsigned *period)
{
    long long value = of_device(device, key, 0);
    *percent = value < 0 ? 0 : (unsigned)value;
    *period = 100000;
    return value < 0 ? (nvmlReturn_t)-value : NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetDecoderUtilization(struct nvmlDevice *device, unsigned *percent, unsigned *period)
{
    return coder(device, "decoder", percent, period);
}

API nvmlReturn_t nvmlDeviceGetEncoderUtilization(struct nvmlDevice *device, unsigned *percent, unsigned *period)
{
    return coder(device, "encoder", percent, period);
}

/* What torch asks when memory is short, and between devices. */
API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, struct nvmlDevice **device)
{
    unsigned domain, number;
    if (sscanf(bus, "%x:%x", &domain, &number) != 2 || !number)
        return NVML_INVALID;
    return nvmlDeviceGetHandleByIndex_v2(number - 1, device);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = 13000;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(void) { return NVML_NOT_SUPPORTED; }
API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_NOT_SUPPORTED; }
API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_NOT_SUPPORTED; }
API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(void) { return NVML_NOT_SUPPORTED; }

/* libcuda.so.1: the driver's functions that torch does not look up through the runtime. */
#include "calls.h"

#include <stdio.h>
#include <string.h>

enum { NOT_FOUND = 500, NOT_INITIALIZED = 3 };

int cuInit(unsigned flags) { return call_enter("cuInit", 0); }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) {
    int error = call_enter("cuDeviceGetCount", 0);
    *count = error ? 0 : call_devices();
    return error;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    call_uuid(device, uuid);
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (call_is_bad_fork()) return NOT_INITIALIZED;
    *flags = 0;
    *active = call_has_context(device);
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)1;
    return call_enter("cuDevicePrimaryCtxRetain", 0);
}
int cuCtxGetCurrent(void **context) { *context = call_is_initialized() ? (void *)1 : NULL; return 0; }
int cuCtxSetCurrent(void *context) { return call_enter("cuCtxSetCurrent", 0); }
int cuGetErrorString(int error, const char **text) { *text = "driver error"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR"; return 0; }
int cuGetProcAddress_v2(const char *name, void **f, int version, unsigned long long flags, int *status) {
    *f = NULL;
    if (status) *status = 1;
    return NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **f, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, f, version, flags, NULL);
}
/* libcaffe2_nvrtc.so needs these symbols to load; kernels compiled by NVRTC cannot run here. */
#define UNSUPPORTED(name) int name(void) { return 801; }
UNSUPPORTED(cuDeviceGetAttribute) UNSUPPORTED(cuFuncGetAttribute) UNSUPPORTED(cuFuncSetAttribute)
UNSUPPORTED(cuFuncSetCacheConfig) UNSUPPORTED(cuLaunchCooperativeKernel) UNSUPPORTED(cuLaunchKernel)
UNSUPPORTED(cuLinkAddData_v2) UNSUPPORTED(cuLinkComplete) UNSUPPORTED(cuLinkCreate_v2)
UNSUPPORTED(cuModuleGetFunction) UNSUPPORTED(cuModuleLoad) UNSUPPORTED(cuModuleLoadData)
UNSUPPORTED(cuModuleLoadDataEx) UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor) UNSUPPORTED(cuPointerGetAttribute)
UNSUPPORTED(cuTensorMapEncodeTiled)

/* The CUDA runtime: memory is address space and an entry in the books (books.h), kernels do
 * nothing, events read the host's clock. */
#define _GNU_SOURCE
#include "calls.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static __thread cudaError_t last_error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t ended(int error) {
    if (error) last_error = error;
    return error;
}
#define ENTER(bytes) do { int e_ = call_enter(__func__, bytes); if (e_) return ended(e_); } while (0)
#define ON_DEVICE() do { int e_ = call_make_context(); if (e_) return ended(e_); } while (0)
#define SUCCESS(name, ...) cudaError_t name(__VA_ARGS__) { ENTER(0); return cudaSuccess; }

/* -- devices */

cudaError_t cudaGetDeviceCount(int *count) {
    ENTER(0);
    *count = call_devices();
    return ended(*count ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) { ENTER(0); *device = call_current(); return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    ENTER(0);
    int error = call_set_current(device);
    return ended(error ? error : call_make_context());
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    ENTER(0);
    int physical = call_physical(device);
    if (physical < 0) return ended(cudaErrorInvalidDevice);
    struct books *books = books_open();
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", books->device[physical].name);
    call_uuid(device, (unsigned char *)&p->uuid);
    p->totalGlobalMem = books->device[physical].total_bytes;
    p->major = 9;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerMultiprocessor = 233472;
    p->sharedMemPerBlockOptin = 232448;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->l2CacheSize = 50 << 20;
    p->unifiedAddressing = p->concurrentKernels = 1;
    p->textureAlignment = 512;
    p->memoryBusWidth = 5120;
    p->pciBusID = physical + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    ENTER(0);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int device) {
    ENTER(0);
    snprintf(id, bytes, "00000000:%02X:00.0", call_physical(device) + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(0);
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { ENTER(0); *can = 1; return cudaSuccess; }
SUCCESS(cudaDeviceEnablePeerAccess, int device, unsigned flags)
cudaError_t cudaDeviceSynchronize(void) { ENTER(0); ON_DEVICE(); return cudaSuccess; }

/* -- errors */

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct { int error; const char *name, *text; } texts[] = {
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNvlinkUncorrectable, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"},
    {cudaErrorHardwareStackError, "cudaErrorHardwareStackError", "hardware stack error"},
    {cudaErrorContained, "cudaErrorContained", "Invalid access of peer GPU memory over nvlink or a hardware error"},
    {cudaErrorSystemNotReady, "cudaErrorSystemNotReady", "system not yet initialized"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};
static const int num_texts = sizeof texts / sizeof *texts;

const char *cudaGetErrorString(cudaError_t error) {
    for (int i = 0; i < num_texts; i++) if (texts[i].error == (int)error) return texts[i].text;
    return error ? "unrecognized error code" : "no error";
}
const char *cudaGetErrorName(cudaError_t error) {
    for (int i = 0; i < num_texts; i++) if (texts[i].error == (int)error) return texts[i].name;
    return error ? "unrecognized error code" : "cudaSuccess";
}

/* -- memory: reserved address space that the host cannot access, like a device's */

enum { MAX_BLOCKS = 65536 };
static struct block { void *at; size_t bytes; int device; } blocks[MAX_BLOCKS];
static int num_blocks;
static uint64_t held; /* by this process, from cudaMalloc and cuMemCreate */

static void note_block(void *at, size_t bytes, int device) {
    pthread_mutex_lock(&lock);
    if (num_blocks < MAX_BLOCKS) blocks[num_blocks++] = (struct block){at, bytes, device};
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaMalloc(void **at, size_t bytes) {
    ENTER(held + bytes);
    ON_DEVICE();
    int device = call_physical(call_current());
    if (!books_take(device, bytes)) return ended(cudaErrorMemoryAllocation);
    *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    held += bytes;
    note_block(*at, bytes, device);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **at, size_t bytes, cudaStream_t stream) { return cudaMalloc(at, bytes); }

cudaError_t cudaFree(void *at) {
    ENTER(0);
    if (!at) return cudaSuccess;
    struct block found = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_blocks; i++) {
        if (blocks[i].at != at) continue;
        found = blocks[i];
        blocks[i] = blocks[--num_blocks];
        break;
    }
    pthread_mutex_unlock(&lock);
    if (!found.at) return ended(cudaErrorInvalidValue);
    munmap(found.at, found.bytes);
    held -= found.bytes;
    books_give(found.device, found.bytes);
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) { return cudaFree(at); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    ENTER(0);
    ON_DEVICE();
    int device = call_physical(call_current());
    struct books *books = books_open();
    books_lock();
    uint64_t used = books_used(books, device);
    books_unlock();
    *total = books->device[device].total_bytes;
    *free_bytes = used < *total ? *total - used : 0;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned flags) {
    ENTER(bytes);
    ON_DEVICE();
    return ended(posix_memalign(at, 4096, bytes) ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaMallocHost(void **at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
cudaError_t cudaFreeHost(void *at) { free(at); return cudaSuccess; }
cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned flags) { ENTER(bytes); return cudaSuccess; }
SUCCESS(cudaHostUnregister, void *at)

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER(0);
    ON_DEVICE();
    char content[SMALL_BYTES];
    int small = bytes <= SMALL_BYTES;
    switch (kind) {
    case cudaMemcpyHostToHost: memcpy(to, from, bytes); break;
    case cudaMemcpyHostToDevice: memory_write(to, from, bytes); break;
    case cudaMemcpyDeviceToDevice:
        memory_write(to, small && memory_read(content, from, bytes) ? content : NULL, bytes);
        break;
    default: memory_read(to, from, bytes);
    }
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER(0);
    if (kind == cudaMemcpyDeviceToHost)
        for (size_t row = 0; row < height; row++) memset((char *)to + row * to_pitch, 0, width);
    return cudaSuccess;
}
SUCCESS(cudaMemcpyToSymbol, const void *symbol, const void *from, size_t bytes, size_t offset, enum cudaMemcpyKind kind)
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    ENTER(0);
    memory_write(at, NULL, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *at, int value, size_t bytes) { return cudaMemsetAsync(at, value, bytes, NULL); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *at) {
    ENTER(0);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) {
    static char somewhere[1 << 16];
    *at = somewhere;
    return cudaSuccess;
}

/* -- kernels */

cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    ENTER(0);
    ON_DEVICE();
    memory_forget();
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) {
    return cudaLaunchKernel(f, config->gridDim, config->blockDim, args, 0, NULL);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(f, grid, block, args, shared, stream);
}
/* The calls into which nvcc of CUDA 13 compiles `<<<>>>`. */
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { *kernel = (cudaKernel_t)f; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *f) {
    ENTER(0);
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}
SUCCESS(cudaFuncSetAttribute, const void *f, enum cudaFuncAttribute attribute, int value)
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks_, const void *f, int threads, size_t shared, unsigned flags) {
    ENTER(0);
    *blocks_ = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks_, const void *f, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks_, f, threads, shared, 0);
}

/* -- streams and events: all work is complete when its call returns */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    ENTER(0);
    *stream = malloc(8);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
SUCCESS(cudaStreamQuery, cudaStream_t stream)
SUCCESS(cudaStreamSynchronize, cudaStream_t stream)
SUCCESS(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
SUCCESS(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { ENTER(0); *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    ENTER(0);
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    ENTER(0);
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void *data) { ENTER(0); f(data); return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ENTER(0);
    *event = calloc(1, sizeof(struct timespec));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    ENTER(0);
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
SUCCESS(cudaEventQuery, cudaEvent_t event)
SUCCESS(cudaEventSynchronize, cudaEvent_t event)
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    ENTER(0);
    const struct timespec *a = (void *)begin, *b = (void *)end;
    *ms = (b->tv_sec - a->tv_sec) * 1e3f + (b->tv_nsec - a->tv_nsec) / 1e6f;
    return cudaSuccess;
}

/* -- the driver's functions that libtorch looks up through the runtime: virtual memory */

struct handle { size_t bytes; int device; };
enum { GRANULE = 2 << 20 };

static int unsupported(void) { return 801; /* CUDA_ERROR_NOT_SUPPORTED */ }
static int nothing(void) { return 0; }
static int granularity(size_t *bytes) { *bytes = GRANULE; return 0; }
static int reserve(uint64_t *at, size_t bytes) {
    char *found = mmap(NULL, bytes + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
    *at = ((uint64_t)found + GRANULE - 1) & ~(uint64_t)(GRANULE - 1);
    return 0;
}
static int create(struct handle **handle, size_t bytes, const int *properties) {
    int error = call_enter("cuMemCreate", held + bytes);
    if (error) return error;
    if ((error = call_make_context())) return error;
    /* CUmemAllocationProp: type, requestedHandleTypes, location.type, location.id */
    int device = call_physical(properties[3]);
    if (device < 0 || !books_take(device, bytes)) return cudaErrorMemoryAllocation;
    held += bytes;
    *handle = malloc(sizeof **handle);
    **handle = (struct handle){bytes, device};
    return 0;
}
static int release(struct handle *handle) {
    held -= handle->bytes;
    books_give(handle->device, handle->bytes);
    free(handle);
    return 0;
}
static int attribute(int *value, int which, int device) {
    /* Only virtual memory management (102) is supported; torch also asks for fabric handles. */
    *value = which == 102;
    return 0;
}
static int error_string(int error, const char **text) { *text = cudaGetErrorString(error); return 0; }
static int current_context(void **context) { *context = call_is_initialized() ? (void *)1 : NULL; return 0; }
static int device_get(int *device, int ordinal) { *device = ordinal; return 0; }

static const struct { const char *name; void *f; } entry_points[] = {
    {"cuMemGetAllocationGranularity", granularity}, {"cuMemAddressReserve", reserve},
    {"cuMemCreate", create}, {"cuMemRelease", release}, {"cuDeviceGetAttribute", attribute},
    {"cuMemMap", nothing}, {"cuMemUnmap", nothing}, {"cuMemSetAccess", nothing},
    {"cuMemAddressFree", nothing}, {"cuGetErrorString", error_string},
    {"cuCtxGetCurrent", current_context}, {"cuCtxSetCurrent", nothing}, {"cuDeviceGet", device_get},
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *f = unsupported;
    for (size_t i = 0; i < sizeof entry_points / sizeof *entry_points; i++)
        if (!strcmp(entry_points[i].name, name)) *f = entry_points[i].f;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count) {
    ENTER(0);
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* libnvidia-ml.so.1: the management library reads the books and initialises no device. */
#include "books.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9 };
enum { MIG = 4 };

static int is_mig(int device) { return !strncmp(books_open()->device[device].uuid, "MIG-", MIG); }
static int index_of(void *handle) { return (int)(intptr_t)handle - 1; }
static void *handle_of(int device) { return (void *)(intptr_t)(device + 1); }

int nvmlInit_v2(void) { return books_open() ? 0 : DRIVER_NOT_LOADED; }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error ? "an error" : "success"; }
int nvmlSystemGetDriverVersion(char *text, unsigned bytes) { snprintf(text, bytes, "580.00"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13020; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }
/* Counts physical devices; all MIG devices are parts of one. */
int nvmlDeviceGetCount_v2(unsigned *count) {
    struct books *books = books_open();
    *count = 0;
    for (int i = 0; i < (int)books->devices; i++) *count += !is_mig(i);
    if (!*count && books->devices) *count = 1;
    return 0;
}
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= books_open()->devices) return NOT_FOUND;
    *handle = handle_of(index);
    return 0;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **handle) { return nvmlDeviceGetHandleByIndex_v2(index, handle); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    struct books *books = books_open();
    for (int i = 0; i < (int)books->devices; i++) {
        if (strcmp(books->device[i].uuid, uuid)) continue;
        *handle = handle_of(i);
        return 0;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
    const char *bus = strchr(id, ':');
    int device = bus ? (int)strtol(bus + 1, NULL, 16) - 1 : -1;
    if (device < 0 || device >= (int)books_open()->devices) return NOT_FOUND;
    *handle = handle_of(device);
    return 0;
}
int nvmlDeviceGetHandleByPciBusId(const char *id, void **handle) { return nvmlDeviceGetHandleByPciBusId_v2(id, handle); }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned bytes) {
    snprintf(text, bytes, "%s", books_open()->device[index_of(handle)].uuid);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned bytes) {
    snprintf(text, bytes, "%s", books_open()->device[index_of(handle)].name);
    return 0;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    *current = *pending = is_mig(index_of(handle));
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
    struct books *books = books_open();
    int device = index_of(handle);
    books_lock();
    uint64_t used = books_used(books, device), total = books->device[device].total_bytes;
    books_unlock();
    total_free_used[0] = total;
    total_free_used[1] = used < total ? total - used : 0;
    total_free_used[2] = used;
    return 0;
}

struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *found) {
    struct books *books = books_open();
    unsigned room = *count;
    *count = 0;
    books_lock();
    books_used(books, index_of(handle));
    for (int i = 0; i < MAX_ENTRIES; i++) {
        struct entry *entry = &books->entry[i];
        if (!entry->pid || entry->device != index_of(handle)) continue;
        if (*count < room) found[*count] = (struct process){entry->pid, entry->bytes, 0, 0};
        ++*count;
    }
    books_unlock();
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process *found) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, found);
}
int nvmlDeviceGetP2PStatus(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *info) { return 0; /* no fabric */ }
